"""Memory of every pipeline stage: what is kept, what works, and what rests; and whether it fits."""

from dataclasses import dataclass, field

from mxsim.moe.memory.activations import (
    KeptTensor,
    Module,
    Scope,
    attention_working_bytes,
    expert_working_bytes,
    kept_bytes,
    layer_tensors,
    mlp_working_bytes,
)
from mxsim.moe.memory.assumptions import Assumptions
from mxsim.moe.memory.models import ModelShape
from mxsim.moe.memory.schedule import count_layers, layers_of_stages, micro_batches_in_flight
from mxsim.moe.recipe import Compute, Recipe

_FP8_WEIGHT_BYTES = 1 + 4 / 128**2  # a 128x128 tile has one FP32 scale


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one GPU of a pipeline stage at its peak."""

    stage: int
    num_dense_layers: int
    num_moe_layers: int
    in_flight: int
    activations: float  # of all micro-batches in flight
    working: float  # of the one layer whose backward pass runs
    weights: float
    gradients: float
    optimizer: float
    fp8_weights: float

    @property
    def total(self) -> float:
        """The sum."""
        static = self.weights + self.gradients + self.optimizer + self.fp8_weights
        return self.activations + self.working + static


@dataclass(frozen=True)
class Run:
    """What is trained and how.

    Args:
        pipeline: stages; expert_parallel: GPUs that share a layer's experts, neighbours in one stage.

    Raises:
        ValueError: if the GPUs, stages, experts and expert-parallel groups do not divide, or a stage has no layer.
    """

    model: ModelShape
    recipe: Recipe
    scope: Scope
    pipeline: int
    expert_parallel: int
    assumptions: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"Run: recipe is {self.recipe!r}, needed a Recipe, such as Recipe.MXFP4")
        if not isinstance(self.scope, frozenset) or not all(isinstance(module, Module) for module in self.scope):
            raise TypeError(f"Run: scope is {self.scope!r}, needed a frozenset of Module")
        for name in ("pipeline", "expert_parallel"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"Run: {name} is {getattr(self, name)!r}, needed a positive integer")
        if self.pipeline > self.model.num_layers:
            raise ValueError(f"Run: pipeline is {self.pipeline}, needed at most the {self.model.num_layers} layers")
        gpus = self.assumptions.num_gpus
        if gpus % (self.pipeline * self.expert_parallel):
            raise ValueError(
                f"Run: {gpus} GPUs are no multiple of pipeline {self.pipeline} x expert_parallel {self.expert_parallel}"
            )
        if self.model.num_experts % self.expert_parallel:
            raise ValueError(
                f"Run: expert_parallel is {self.expert_parallel}, needed a divisor of {self.model.num_experts} experts"
            )

    def layer(self, *, is_dense: bool) -> list[KeptTensor]:
        """The tensors of one layer and one micro-batch."""
        a = self.assumptions
        return layer_tensors(
            self.model, a.tokens, self.recipe, self.scope, is_dense=is_dense, imbalance=a.rows_over_balanced
        )

    def stages(self) -> list[StageMemory]:
        """From the first to the last."""
        return [
            self._stage(p, layers) for p, layers in enumerate(layers_of_stages(self.model.num_layers, self.pipeline))
        ]

    def _stage(self, stage: int, layers: range) -> StageMemory:
        model, a = self.model, self.assumptions
        num_dense, num_moe = count_layers(model, layers)
        in_flight = micro_batches_in_flight(self.pipeline, stage)
        activations = num_dense * kept_bytes(self.layer(is_dense=True)) + num_moe * kept_bytes(
            self.layer(is_dense=False)
        )

        experts = num_moe * model.num_experts // self.expert_parallel * model.num_expert_parameters
        linear = len(layers) * model.num_attention_parameters + num_dense * model.num_dense_mlp_parameters
        linear += num_moe * model.num_shared_experts * model.num_expert_parameters
        other = num_moe * model.num_experts * model.hidden_size
        other += ((stage == 0) + (stage == self.pipeline - 1)) * model.num_embedding_parameters
        copies = a.num_gpus // self.pipeline  # of what is not an expert; the optimizer's state is shared among them
        expert_copies = copies // self.expert_parallel
        return StageMemory(
            stage,
            num_dense,
            num_moe,
            in_flight,
            activations=in_flight * activations,
            working=self._working(num_dense, num_moe),
            weights=a.weight_bytes * (experts + linear + other),
            gradients=a.gradient_bytes * (experts + linear + other),
            optimizer=a.optimizer_bytes * (experts / expert_copies + (linear + other) / copies),
            fp8_weights=self._fp8_bytes(experts + linear),
        )

    def _fp8_bytes(self, num_parameters: int) -> float:
        if self.recipe.compute is Compute.BF16:
            return 0.0
        return self.assumptions.fp8_weight_copies * _FP8_WEIGHT_BYTES * num_parameters

    def _working(self, num_dense: int, num_moe: int) -> float:
        """The largest of the modules that work one after another."""
        model, tokens = self.model, self.assumptions.tokens
        sizes = [attention_working_bytes(model, tokens, self.recipe, self.scope)]
        if num_dense:
            sizes.append(
                mlp_working_bytes(tokens, model.hidden_size, model.dense_intermediate_size, self.recipe, self.scope)
            )
        if num_moe:
            rows = round(tokens * model.top_k * self.assumptions.rows_over_balanced)
            sizes.append(
                expert_working_bytes(rows, model.hidden_size, model.intermediate_size, self.recipe, self.scope)
            )
        return max(sizes)


@dataclass(frozen=True)
class Verdict:
    """Of a run on GPUs of nominal gpu_gb (1e9 bytes each).

    worst: the stage with the most bytes. It alone decides on out of memory.
    """

    stages: tuple[StageMemory, ...]
    gpu_gb: float
    limit: float

    @property
    def worst(self) -> StageMemory:
        """The stage with the most bytes, the first of equals."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        """Whether the worst stage stays within the limit."""
        return self.worst.total <= self.limit

    @property
    def mean_share(self) -> float:
        """Mean of the stages' totals over the nominal memory."""
        return sum(stage.total for stage in self.stages) / len(self.stages) / (self.gpu_gb * 1e9)

    @property
    def worst_share(self) -> float:
        """The worst stage's total over the nominal memory."""
        return self.worst.total / (self.gpu_gb * 1e9)


def judge(run: Run, gpu_gb: float = 80.0) -> Verdict:
    """Memory of each stage against what such a GPU has, less the reserve.

    Raises:
        ValueError: for a gpu_gb that is no finite number above 0.
    """
    if not 0 < gpu_gb < float("inf"):
        raise ValueError(f"judge: gpu_gb is {gpu_gb}, needed a finite number above 0")
    limit = gpu_gb * 1e9 * run.assumptions.capacity_share - run.assumptions.reserve_gb * 1e9
    return Verdict(tuple(run.stages()), gpu_gb, limit)
