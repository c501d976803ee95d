"""A dense linear layer in the same recipes: one group of rows."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mxsim.moe.activation_observer import show
from mxsim.moe.expert_mlp import draw_seed, recipe_of, seed_of
from mxsim.moe.experts import check_input, check_sizes, check_weights
from mxsim.moe.grouped_gemm import Gemm, grouped_gemm, grouped_wgrad, matmul
from mxsim.moe.groups import Groups
from mxsim.moe.library import not_differentiable, operator
from mxsim.moe.recipe import Activation, Compute, Recipe
from mxsim.moe.stored import columns_of, empty_kept, grown, quantize_gradient, quantize_input
from mxsim.moe.weights import Fp8Weight, Fp8WeightCache


def _linear_fake(
    x: Tensor, w: list[Tensor], seed: Tensor | None, recipe: str, gemm: str, static_shapes: bool
) -> tuple[Tensor, list[Tensor]]:
    return x.new_empty((x.shape[0], w[0].shape[1])), empty_kept(x, Activation.LINEAR_INPUT, recipe_of(recipe), 1)


def _linear(
    x: Tensor, w: list[Tensor], seed: Tensor | None, recipe: str, gemm: str, static_shapes: bool
) -> tuple[Tensor, list[Tensor]]:
    """(y [M, N], what is kept of x [M, K]); w: the tensors of the `Fp8Weight` of [1, N, K]."""
    groups = Groups((x.shape[0],), x.device)
    show(Activation.LINEAR_INPUT, x)
    rows, kept = quantize_input(x, Activation.LINEAR_INPUT, recipe_of(recipe), groups.sizes, seed_of(seed, 0))
    if static_shapes and len(kept) == 3:
        kept = grown(kept, x.shape[0])
    return grouped_gemm(rows, Fp8Weight(*w).tiles(), groups, gemm=Gemm(gemm)), kept


def _linear_backward_fake(
    dy: Tensor,
    kept: list[Tensor],
    w: list[Tensor],
    seed: Tensor | None,
    recipe: str,
    gemm: str,
    weight_dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    _, n, k = w[0].shape
    nothing = dy.new_empty(0)
    return (
        dy.new_empty((dy.shape[0], k)) if needs[0] else nothing,
        dy.new_empty((n, k), dtype=weight_dtype) if needs[1] else nothing,
    )


def _linear_backward(
    dy: Tensor,
    kept: list[Tensor],
    w: list[Tensor],
    seed: Tensor | None,
    recipe: str,
    gemm: str,
    weight_dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """(dx, dw); an empty tensor for what is not needed."""
    need_dx, need_dw = needs
    groups = Groups((dy.shape[0],), dy.device)
    r = recipe_of(recipe)
    rows, cols = quantize_gradient(dy, r, groups.sizes, seed_of(seed, 1))
    dx = dw = dy.new_empty(0)
    if need_dx:
        dx = grouped_gemm(rows, Fp8Weight(*w).tiles_t(), groups, gemm=Gemm(gemm))
    if need_dw:
        x_cols = columns_of(kept, Activation.LINEAR_INPUT, r, groups.sizes)
        dw = grouped_wgrad(cols, x_cols, groups, gemm=Gemm(gemm), out_dtype=weight_dtype).squeeze(0)
    return dx, dw


linear_forward = operator(
    "moe_linear(Tensor x, Tensor[] w, Tensor? seed, str recipe, str gemm, bool static_shapes) -> (Tensor, Tensor[])",
    cpu=_linear,
    cuda=_linear,
    fake=_linear_fake,
    backward=not_differentiable("moe_linear"),
)
linear_backward = operator(
    "moe_linear_backward(Tensor dy, Tensor[] kept, Tensor[] w, Tensor? seed, str recipe, str gemm, "
    "ScalarType weight_dtype, bool[2] needs) -> (Tensor, Tensor)",
    cpu=_linear_backward,
    cuda=_linear_backward,
    fake=_linear_backward_fake,
    backward=not_differentiable("moe_linear_backward"),
)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, seed: Tensor | None, recipe: str, gemm: str, *operands: Tensor
    ) -> Tensor:
        y, kept = linear_forward(x, list(operands), seed, recipe, gemm, torch.compiler.is_compiling())
        ctx.save_for_backward(seed, *kept, *operands)
        ctx.settings = recipe, gemm, w.dtype
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        seed, *saved = ctx.saved_tensors  # once: activation checkpointing allows no more
        kept, operands = saved[:-4], saved[-4:]
        needs = ctx.needs_input_grad[:2]
        dx, dw = linear_backward(dy.contiguous(), kept, operands, seed, *ctx.settings, needs)
        return dx if needs[0] else None, dw if needs[1] else None, *(None for _ in ctx.needs_input_grad[2:])


class Linear(nn.Module):
    """y = x w^T + bias in a recipe; the parameters of `nn.Linear`, in every recipe.

    MXFP4: one kernel reads x once and writes both the MXFP4 codes that are kept and the FP8 rows that the GEMM reads.
    The bias is added in BF16.

    Args:
        in_features, out_features: FP8 recipes: multiples of 128.
        recipe, gemm: as in `Experts`; the recipe's LINEAR_INPUT says what is kept of x.

    Raises:
        ValueError: for sizes that the recipe's blocks do not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        recipe: Recipe = Recipe.MXFP4,
        gemm: Gemm | str = Gemm.AUTO,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes("Linear", recipe, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.recipe, self.gemm = recipe, Gemm(gemm)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.fp8_weights = Fp8WeightCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1 / sqrt(in_features), as nn.Linear."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def prepare_weights(self) -> None:
        """Make the FP8 copies of the weight once, for all passes until an optimizer changes it."""
        if self.recipe.compute is Compute.FP8:
            self.fp8_weights.prepare("weight", self.weight)

    def forward(self, x: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch N"]:
        """y, in x's dtype; FP8 recipes take bfloat16.

        Raises:
            TypeError: for a dtype that the recipe does not take.
            ValueError: if the last axis is not in_features long.
        """
        rows = x.reshape(-1, x.shape[-1]) if x.ndim else x
        check_input("Linear", rows, self.in_features, self.recipe)
        check_weights("Linear", self.recipe, weight=self.weight)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.recipe.compute is Compute.BF16:
            weight = self.weight.to(x.dtype)
            return matmul(x, weight.t()) if bias is None else F.linear(x, weight, bias)
        operands = self.fp8_weights.get("weight", self.weight)
        y: Tensor = _Linear.apply(
            rows, self.weight, draw_seed(self.recipe), self.recipe.key, self.gemm.value, *operands
        )
        y = y.view(*x.shape[:-1], self.out_features)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        return f"{self.in_features} -> {self.out_features}; {self.recipe}"
