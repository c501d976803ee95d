"""The layer that is timed: permute, experts, unpermute, the routing given; what it keeps, and whether it is right."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import BFloat16
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mxsim.bench.moe.workload import LayerShape, Tokens
from mxsim.moe import Activation, Experts, Fp4Tokens, Recipe, permute, unpermute_sum
from mxsim.moe.recipe import Compute

_RESULTS = ("y", "dx", "dprobs", "dw1", "dw2")
# Relative L2 error against BF16 of any result. FP8: rounding errors near 2**-5.5 relative of each operand. MXFP4 adds
# those of its activations, near 0.11 each, which follow one another up to three times.
_MAX_ERROR = {Compute.FP8: {False: 0.10, True: 0.35}}


class Layer:
    """`MoE.forward` and its gradients without the router.

    weights_inside: FP8 copies of the weights are made in every forward pass, rather than once before.
    """

    def __init__(
        self, recipe: Recipe, shape: LayerShape, weights: Sequence[nn.Parameter], *, weights_inside: bool = False
    ) -> None:
        self.recipe, self.weights_inside = recipe, weights_inside
        self.experts = Experts(
            shape.hidden, shape.intermediate, shape.num_experts, recipe=recipe, device="meta", dtype=torch.bfloat16
        )
        self.experts.w1, self.experts.w2 = weights
        if not weights_inside:
            self.experts.prepare_weights()

    @property
    def name(self) -> str:
        """The recipe, and whether it makes FP8 weights."""
        return f"{self.recipe.name}, weights inside" if self.weights_inside else self.recipe.name

    def forward(self, x_TH: Tensor, tokens: Tokens) -> BFloat16[Tensor, "T H"]:
        """The sum over a token's experts."""
        rows: Tensor | Fp4Tokens
        if self.recipe.keeps_fp4(Activation.EXPERT_INPUT):
            rows = Fp4Tokens.quantize(x_TH, self.recipe).permute(tokens.permutation)
        else:
            rows = permute(x_TH, tokens.permutation)
        y_RH = self.experts(rows, tokens.sizes_E, tokens.probs_R)
        return unpermute_sum(y_RH, tokens.permutation)

    def step(self, tokens: Tokens) -> tuple[Tensor, ...]:
        """y and the gradients of x, probs, w1 and w2."""
        y = self.forward(tokens.x_TH, tokens)
        inputs = (tokens.x_TH, tokens.probs_R, self.experts.w1, self.experts.w2)
        return y.detach(), *torch.autograd.grad(y, inputs, tokens.dy_TH)


# ------------------------------------------------------------------------------------------------------------- correct
@dataclass(frozen=True)
class Check:
    """Relative L2 errors of a recipe's results against BF16's, by result."""

    recipe: str
    errors: dict[str, float]
    max_error: float

    @property
    def problem(self) -> str:
        """What is wrong, or nothing; NaN is."""
        wrong = [f"{name} {error:.3g}" for name, error in self.errors.items() if not error <= self.max_error]
        return f"relative error against BF16: {', '.join(wrong)}, at most {self.max_error:g}" if wrong else ""


def check_against_bf16(layer: Layer, results: Sequence[Tensor], bf16: Sequence[Tensor]) -> Check:
    """Errors of what `Layer.step` returned; NaN or infinity in a result makes its error so."""
    errors = {name: relative_error(x, y) for name, x, y in zip(_RESULTS, results, bf16, strict=True)}
    is_fp4 = bool(layer.recipe.stored_fp4)
    return Check(layer.name, errors, _MAX_ERROR[layer.recipe.compute][is_fp4])


def relative_error(x: Tensor, reference: Tensor) -> float:
    """|x - reference| / |reference|, summed a matrix at a time."""
    error = norm = 0.0
    for a, b in zip(_matrices(x), _matrices(reference), strict=True):
        error += float((a.float() - b.float()).square().sum(dtype=torch.float64))
        norm += float(b.float().square().sum(dtype=torch.float64))
    return float(torch.tensor(error / norm, dtype=torch.float64).sqrt()) if norm else float("nan")


def _matrices(x: Tensor) -> Sequence[Tensor]:
    return x.unbind() if x.dim() == 3 else (x,)


# --------------------------------------------------------------------------------------------------------------- saved
@dataclass(frozen=True)
class Saved:
    """A tensor that autograd keeps for the backward pass; bytes of its storage."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def saved_activations(layer: Layer, tokens: Tokens) -> list[Saved]:
    """What a forward pass keeps, each storage once, in the order of saving.

    Left out is what is given: weights and their FP8 copies, probabilities; and integers that say where rows are.
    """
    storages: dict[int, Saved] = {}
    alive = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if x.dtype is not torch.int64 and storage.nbytes():
            alive.append(storage)  # so that its address stays its own
            name = str(x.dtype).removeprefix("torch.")
            storages.setdefault(storage.data_ptr(), Saved(name, tuple(x.shape), storage.nbytes()))
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        y = layer.forward(tokens.x_TH, tokens)
    del y
    given = [tokens.probs_R, layer.experts.w1, layer.experts.w2]
    if layer.recipe.compute is Compute.FP8:
        weights = (("w1", layer.experts.w1), ("w2", layer.experts.w2))
        given += [copy for name, w in weights for copy in layer.experts.fp8_weights.get(name, w)]
    left_out = {x.untyped_storage().data_ptr() for x in given}
    return [saved for address, saved in storages.items() if address not in left_out]
