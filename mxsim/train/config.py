"""Everything that decides a training run but the text: a dataclass, its presets, and its fields from strings."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from mxsim.moe import Compute, Gemm, Recipe
from mxsim.train.recipes import RECIPES

VOCABULARY = 256  # bytes
_FP8_BLOCK = 128


class ConfigError(ValueError):
    """A configuration that no run can have; the message is one line."""


@dataclass(frozen=True)
class TrainConfig:
    """A decoder-only transformer with mixture-of-experts layers, its optimizer and its log.

    The recipe is that of the experts, routed and shared. `linears` is that of the attention's projections and of the
    MLPs of the first, dense layers: "bf16", the default, leaves them as they are, so that recipes differ in the expert
    layers alone; "recipe" gives them the experts' recipe. Embedding, head, attention itself, norms and routers are
    never quantized.

    Raises:
        ConfigError: for a field that has no place in a run, or fields that contradict each other.
    """

    recipe: str = "mxfp4"  # of mxsim.train.RECIPES
    linears: str = "bf16"  # or "recipe"
    seed: int = 0  # of the initial weights and of the order of the text

    # The model.
    hidden_size: int = 128
    num_layers: int = 2
    num_dense_layers: int = 0  # of the first layers: one MLP for all tokens
    dense_size: int = 512  # its intermediate size
    num_heads: int = 2
    expert_size: int = 128  # intermediate size of an expert
    num_experts: int = 8
    top_k: int = 2
    num_shared_experts: int = 1
    has_tied_head: bool = False
    bias_update_speed: float = 0.001  # of the routers; 0 leaves them unbalanced
    gemm: str = Gemm.AUTO.value  # backend of the FP8 GEMMs; all but "dequantized" give the same bits
    compile: bool = False  # torch.compile of every layer

    # The steps.
    steps: int = 400
    sequence_length: int = 128
    batch_size: int = 16  # sequences a step
    learning_rate: float = 3e-3  # at its peak
    warmup_steps: int = 20
    final_learning_rate: float = 0.1  # share of the peak, where the cosine ends
    weight_decay: float = 0.1  # of matrices
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0

    # What is measured and kept. A step has number 1 or more; 0 means never.
    log_every: int = 10
    eval_every: int = 100
    final_evals: int = 5  # evenly over the last 5 % of the steps, the last one included
    eval_sequences: int = 64
    diagnose_every: int = 100  # and at the end
    diagnose_tokens: int = 512
    checkpoint_every: int = 100  # and at the end; 0: on interruption only

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = (int, float) if field.type is float else field.type
            if not isinstance(value, wanted) or (isinstance(value, bool) and field.type is not bool):  # type: ignore[arg-type]
                raise ConfigError(f"{field.name} is {value!r}, needed {_kind(field.type)}")
        for name in ("hidden_size", "num_layers", "num_heads", "expert_size", "num_experts", "top_k", "dense_size"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        for name in ("steps", "sequence_length", "batch_size", "log_every", "eval_sequences", "diagnose_tokens"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        for name in ("num_shared_experts", "seed", "final_evals", "warmup_steps"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("eval_every", "diagnose_every", "checkpoint_every"):
            self._check(name, getattr(self, name) >= 0, "0 (never) or more")
        for name in ("weight_decay", "bias_update_speed"):
            self._check(name, 0 <= getattr(self, name) < float("inf"), "0 or more")
        for name in ("learning_rate", "max_grad_norm"):
            self._check(name, 0 < getattr(self, name) < float("inf"), "more than 0")
        for name in ("beta1", "beta2"):
            self._check(name, 0 <= getattr(self, name) < 1, "0 to 1, 1 excluded")
        self._check("final_learning_rate", 0 <= self.final_learning_rate <= 1, "0 to 1")
        self._check("recipe", self.recipe in RECIPES, f"one of {', '.join(RECIPES)}")
        self._check("linears", self.linears in ("bf16", "recipe"), "bf16 or recipe")
        self._check("gemm", self.gemm in list(Gemm), f"one of {', '.join(Gemm)}")
        self._check("top_k", self.top_k <= self.num_experts, f"at most {self.num_experts}, the number of experts")
        self._check(
            "num_dense_layers", 0 <= self.num_dense_layers <= self.num_layers, f"0 to {self.num_layers}, the layers"
        )
        self._check(
            "num_heads",
            self.hidden_size % self.num_heads == 0 and self.hidden_size // self.num_heads % 2 == 0,
            f"heads of an even size for a hidden size of {self.hidden_size}",
        )
        if self.expert_recipe.compute is Compute.FP8:
            for name in ("hidden_size", "expert_size", "dense_size"):
                self._check(name, getattr(self, name) % _FP8_BLOCK == 0, f"a multiple of {_FP8_BLOCK} for FP8")

    def _check(self, name: str, is_good: bool, needed: str) -> None:
        if not is_good:
            raise ConfigError(f"{name} is {getattr(self, name)!r}, needed {needed}")

    @property
    def expert_recipe(self) -> Recipe:
        return RECIPES[self.recipe]

    @property
    def linear_recipe(self) -> Recipe:
        return self.expert_recipe if self.linears == "recipe" else Recipe.BF16

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    def with_fields(self, assignments: Iterable[str]) -> "TrainConfig":
        """The same but for `name=value` strings.

        Raises:
            ConfigError: for text without "=", an unknown name, or a value of another type.

        >>> TrainConfig().with_fields(["hidden_size=256", "has_tied_head=true"]).hidden_size
        256
        """
        types = {field.name: field.type for field in fields(self)}
        values: dict[str, Any] = {}
        for assignment in assignments:
            name, equals, text = assignment.partition("=")
            if not equals:
                raise ConfigError(f"{assignment!r} is no field=value")
            if name not in types:
                raise ConfigError(f"unknown field {name!r} (known: {', '.join(types)})")
            values[name] = _parse(name, text, types[name])
        return replace(self, **values)


def _parse(name: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{name} is {text!r}, needed true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, needed {_kind(kind)}") from None


def _kind(kind: Any) -> str:
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[kind]


PRESETS: dict[str, TrainConfig] = {
    # Two cores, minutes.
    "tiny": TrainConfig(),
    # 105 M tokens in some four minutes of one H200, if it makes 450,000 tokens a second: 250 M parameters, 50 M of them
    # active for a token. An expert gets 8192 rows of a step.
    "h200": TrainConfig(
        hidden_size=768,
        num_layers=6,
        num_heads=12,
        expert_size=512,
        dense_size=2048,
        num_experts=32,
        top_k=4,
        steps=1600,
        sequence_length=1024,
        batch_size=64,
        learning_rate=1e-3,
        warmup_steps=80,
        log_every=10,
        eval_every=200,
        eval_sequences=512,
        diagnose_every=200,
        diagnose_tokens=4096,
        checkpoint_every=0,  # 3 GB each
    ),
}
