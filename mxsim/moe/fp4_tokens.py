"""Tokens that are already in MXFP4, and still have a gradient."""

from typing import Any, NamedTuple

import torch
from jaxtyping import BFloat16, UInt8
from torch import Tensor

from mxsim.kernels import Fp4Rows
from mxsim.moe.expert_mlp import recipe_of, seed_of
from mxsim.moe.library import not_differentiable, operator
from mxsim.moe.permute import Permutation, permute_rows, unpermute_sum
from mxsim.moe.recipe import Recipe
from mxsim.moe.stored import empty_fp4, to_fp4


class Fp4Tokens(NamedTuple):
    """Rows of E2M1 codes and E8M0 scales, and the tensor that their gradient belongs to.

    Codes have no gradient. `anchor` stands in for the values in the autograd graph: bfloat16 [R, H] with all strides 0,
    one element of storage, never read. Whatever consumes the codes returns the gradient of the values to it.
    """

    codes: UInt8[Tensor, "R H/2"]
    scales: UInt8[Tensor, "R H/32"]
    anchor: BFloat16[Tensor, "R H"]

    @classmethod
    def quantize(cls, x: BFloat16[Tensor, "T H"], recipe: Recipe, seed: Tensor | None = None) -> "Fp4Tokens":
        """x in MXFP4, once a token; the gradient passes straight through the quantization."""
        if seed is None:
            codes, scales = to_fp4(x.detach(), recipe, None)
        else:
            codes, scales = _quantize_stochastically(x.detach(), seed, recipe.key)
        return cls(codes, scales, _Anchor.apply(x))

    def permute(self, permutation: Permutation) -> "Fp4Tokens":
        """The rows of each expert, in order; the gradient sums over a token's rows."""
        rows = Fp4Rows(permute_rows(self.codes, permutation), permute_rows(self.scales, permutation))
        return Fp4Tokens(*rows, _PermutedAnchor.apply(self.anchor, *permutation))


def _stochastic(x: Tensor, seed: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    codes, scales = to_fp4(x, recipe_of(recipe), seed_of(seed, 0))
    return codes, scales


def _stochastic_fake(x: Tensor, seed: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    codes, scales = empty_fp4(x)
    return codes, scales


# An operator, since torch.compile must not read the seed on the host.
_quantize_stochastically = operator(
    "moe_fp4_tokens(Tensor x, Tensor seed, str recipe) -> (Tensor, Tensor)",
    cpu=_stochastic,
    cuda=_stochastic,
    fake=_stochastic_fake,
    backward=not_differentiable("moe_fp4_tokens"),
)


def _empty_anchor(num_rows: int, like: Tensor) -> Tensor:
    return like.new_empty(1, 1).expand(num_rows, like.shape[1])


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _empty_anchor(x.shape[0], x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class _PermutedAnchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, group_sizes_E: Tensor, row_token_R: Tensor, row_of_TK: Tensor) -> Tensor:
        ctx.save_for_backward(group_sizes_E, row_token_R, row_of_TK)
        return _empty_anchor(row_token_R.shape[0], anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return unpermute_sum(grad, Permutation(*ctx.saved_tensors)), None, None, None
