"""Expert MLPs: the module that holds the weights of all experts, and its gradient."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from mxsim.moe import expert_mlp
from mxsim.moe.expert_mlp import draw_seed
from mxsim.moe.fp4_tokens import Fp4Tokens
from mxsim.moe.grouped_gemm import Gemm
from mxsim.moe.recipe import Activation, Compute, Recipe
from mxsim.moe.weights import Fp8WeightCache

_FP8_BLOCK = 128


class _ExpertMlp(torch.autograd.Function):
    """y of x (or of MXFP4 codes, whose gradient goes to `anchor`); saves what the recipe keeps and nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_scales: Tensor | None,
        anchor: Tensor | None,
        probs: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        group_sizes: Tensor,
        seed: Tensor | None,
        recipe: str,
        gemm: str,
        *operands: Tensor,
    ) -> Tensor:
        ops1, ops2 = (list(operands[:4]), list(operands[4:])) if len(operands) else ([w1], [w2])
        static = torch.compiler.is_compiling()
        y, kept = expert_mlp.experts(x, x_scales, probs, ops1, ops2, group_sizes, seed, recipe, gemm, static)
        keeps_x = x_scales is not None or len(operands) == 0
        ctx.save_for_backward(
            x if keeps_x else None, x_scales, probs, seed, *kept, *(operands if len(operands) else (w1, w2))
        )
        ctx.num_kept = len(kept)
        ctx.settings = recipe, gemm, w1.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, x_scales, probs, seed, *rest = ctx.saved_tensors
        kept, operands = rest[: ctx.num_kept], rest[ctx.num_kept :]
        half = len(operands) // 2
        recipe, gemm, dtype = ctx.settings
        need_x, _, need_anchor, need_probs, need_w1, need_w2 = ctx.needs_input_grad[:6]
        needs = (need_x or need_anchor, need_probs, need_w1, need_w2)
        dx, dprobs, dw1, dw2 = expert_mlp.experts_backward(
            dy, x, x_scales, probs, kept, operands[:half], operands[half:], seed, recipe, gemm, dtype, needs
        )
        return (
            dx if need_x else None,
            None,
            dx if need_anchor else None,
            dprobs if need_probs else None,
            dw1 if need_w1 else None,
            dw2 if need_w2 else None,
            *(None for _ in ctx.needs_input_grad[6:]),
        )


class Experts(nn.Module):
    """SwiGLU experts over ragged groups of rows: y_e = (silu(x w_gate^T) * (x w_up^T) * prob) w_down^T.

    Parameters: w1 [E, 2F, H], gate rows first, and w2 [E, H, F]; the same in every recipe, so a state_dict trained in
    one loads in another. The probability enters before the second GEMM, so that y need not be kept for its gradient.

    Args:
        hidden_size: H. FP8 recipes: a multiple of 128.
        intermediate_size: F. FP8 recipes: a multiple of 128.
        num_experts: E.
        recipe: what is computed in and what is kept for the backward pass.
        gemm: backend of the GEMMs; "hopper" computes the bits of an H200 on any machine.

    Raises:
        ValueError: for sizes that the recipe's blocks do not divide.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        recipe: Recipe = Recipe.MXFP4,
        gemm: Gemm | str = Gemm.AUTO,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(
            "Experts", recipe, hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts
        )
        self.hidden_size, self.intermediate_size, self.num_experts = hidden_size, intermediate_size, num_experts
        self.recipe, self.gemm = recipe, Gemm(gemm)
        self.w1 = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size, device=device, dtype=dtype))
        self.fp8_weights = Fp8WeightCache()
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Uniform in +-1 / sqrt(fan in), as nn.Linear; drawn from torch's generator, or this one."""
        for weight in (self.w1, self.w2):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound, generator)

    def prepare_weights(self) -> None:
        """Make the FP8 copies of the weights once, for all passes until an optimizer changes them."""
        if self.recipe.compute is Compute.FP8:
            self.fp8_weights.prepare("w1", self.w1)
            self.fp8_weights.prepare("w2", self.w2)

    def forward(
        self,
        x: Float[Tensor, "R H"] | Fp4Tokens,
        group_sizes: Int64[Tensor, " E"],
        probs: Float[Tensor, " R"] | None = None,
    ) -> Float[Tensor, "R H"]:
        """y, in bfloat16 (compute BF16: in x's dtype).

        Args:
            x: the rows of expert 0, then of expert 1, ...; already in MXFP4 where the recipe keeps the expert input so.
            group_sizes: rows of each expert, zeros allowed, on any device; one on the device is waited for.
            probs: float32, each row's routing weight.

        Raises:
            TypeError: if x is MXFP4 and the recipe does not keep the expert input so, for group sizes that are no
                tensor, or for a dtype that the recipe does not take: FP8 recipes take x in bfloat16, weights in
                bfloat16 or float32.
            ValueError: if shapes do not fit, or group sizes are negative or do not sum to R.
        """
        fp8 = self.recipe.compute is Compute.FP8
        check_input("Experts", x, self.hidden_size, self.recipe)
        check_weights("Experts", self.recipe, w1=self.w1, w2=self.w2)
        if not isinstance(group_sizes, Tensor):
            raise TypeError(f"Experts: group_sizes is a {type(group_sizes).__name__}, needed a torch tensor")
        if isinstance(x, Fp4Tokens):
            rows, scales, anchor = x.codes, x.scales, x.anchor
        else:
            rows, scales, anchor = x, None, None
        weights = (self.w1, self.w2) if fp8 else (self.w1.to(x.dtype), self.w2.to(x.dtype))
        operands = (*self.fp8_weights.get("w1", self.w1), *self.fp8_weights.get("w2", self.w2)) if fp8 else ()
        result: Tensor = _ExpertMlp.apply(
            rows,
            scales,
            anchor,
            probs,
            *weights,
            group_sizes,
            draw_seed(self.recipe),
            self.recipe.key,
            self.gemm.value,
            *operands,
        )
        return result

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        return f"{self.num_experts} experts, {self.hidden_size} -> {self.intermediate_size}; {self.recipe}"


def check_sizes(what: str, recipe: Recipe, **sizes: int) -> None:
    """Every size is a positive integer, and, but for counts, a multiple of 128 where the recipe computes in FP8."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{what}: recipe is {recipe!r}, needed a Recipe, such as Recipe.MXFP4")
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{what}: {name} is {size!r}, needed a positive integer")
        if recipe.compute is Compute.FP8 and not name.startswith("num_") and size % _FP8_BLOCK:
            raise ValueError(f"{what}: {name} is {size}, which is not a multiple of {_FP8_BLOCK} as FP8 blocks need")


def check_input(what: str, x: Tensor | Fp4Tokens, hidden_size: int, recipe: Recipe) -> None:
    """x is [rows, hidden_size] in a dtype that the recipe takes."""
    if isinstance(x, Fp4Tokens):
        if not recipe.keeps_fp4(Activation.EXPERT_INPUT):
            raise TypeError(f"{what}: x is in MXFP4, and the recipe {recipe.name} takes a tensor")
        x = x.anchor
    elif recipe.compute is Compute.FP8 and x.dtype != torch.bfloat16:
        raise TypeError(f"{what}: x has dtype {x.dtype}, and the recipe {recipe.name} needed bfloat16")
    elif not x.is_floating_point():
        raise TypeError(f"{what}: x has dtype {x.dtype}, needed a floating-point tensor")
    if x.ndim != 2 or x.shape[1] != hidden_size:
        raise ValueError(f"{what}: x has shape {tuple(x.shape)}, needed [rows, {hidden_size}]")


def check_weights(what: str, recipe: Recipe, **weights: Tensor) -> None:
    """Weights are in a dtype whose gradient the recipe's GEMMs return."""
    for name, weight in weights.items():
        if recipe.compute is Compute.FP8 and weight.dtype not in (torch.bfloat16, torch.float32):
            raise TypeError(
                f"{what}: {name} has dtype {weight.dtype}, and the recipe {recipe.name} needed bfloat16 or float32"
            )
