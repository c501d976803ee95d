"""The SwiGLU expert MLP over ragged groups, forward and backward, as two operators.

    h = x w1^T;  a = silu(gate) * up * prob, [gate | up] = h;  y = a w2^T       expert by expert
    da = dy w2;  dw2 = dy^T a;  dh, dprob from (da, h);  dx = dh w1;  dw1 = dh^T x

They are operators so that torch.compile does not look inside: group sizes are read on the host there. Everything that
the backward pass needs beyond the forward's own inputs is among the results of the forward.

Shapes: E experts, R routed rows (the sum of the group sizes), H hidden, F intermediate.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mxsim.blocks import ScaleRule
from mxsim.formats import Rounding
from mxsim.kernels import Fp4Rows
from mxsim.kernels.layouts import FP4_BLOCK
from mxsim.moe.activation_observer import show
from mxsim.moe.grouped_gemm import Gemm, grouped_gemm, grouped_wgrad
from mxsim.moe.groups import Groups
from mxsim.moe.library import not_differentiable, operator
from mxsim.moe.recipe import Activation, Compute, Conversion, Gradients, Recipe
from mxsim.moe.stored import (
    columns_of,
    columns_of_tokens,
    empty_kept,
    grown,
    quantize_gradient,
    quantize_input,
    rows_of_tokens,
    to_fp4,
)
from mxsim.moe.swiglu import swiglu, swiglu_backward
from mxsim.moe.weights import Fp8Weight

# ------------------------------------------------------------------------------------- a recipe as an operator's string


@lru_cache
def recipe_of(key: str) -> Recipe:
    """The recipe with that key; its name is lost."""
    compute, stored, rule, headroom, rounding, conversion, gradients = key.split(";")
    return Recipe(
        "",
        Compute(compute),
        stored_fp4=frozenset(Activation(name) for name in stored.split(",") if name),
        scale_rule=ScaleRule(rule) if rule else None,
        headroom=int(headroom),
        rounding=Rounding(rounding),
        conversion=Conversion(conversion),
        gradients=Gradients(gradients),
    )


# ----------------------------------------------------------------------------------------------------------- operators
def draw_seed(recipe: Recipe) -> Tensor | None:
    """A seed from torch's CPU generator where the recipe rounds stochastically: torch.manual_seed fixes it."""
    return torch.randint(2**62, (1,)) if recipe.rounding is Rounding.STOCHASTIC else None


def seed_of(seed: Tensor | None, index: int) -> int | None:
    """The index-th seed of a step whose first one the tensor holds."""
    return None if seed is None else (int(seed) + index) % 2**63


def _experts_fake(
    x: Tensor,
    x_scales: Tensor | None,
    probs: Tensor | None,
    w1: list[Tensor],
    w2: list[Tensor],
    group_sizes: Tensor,
    seed: Tensor | None,
    recipe: str,
    gemm: str,
    static_shapes: bool,
) -> tuple[Tensor, list[Tensor]]:
    r = recipe_of(recipe)
    num_rows, num_experts = x.shape[0], w1[0].shape[0]
    dtype = x.dtype if x_scales is None else torch.bfloat16
    h = x.new_empty((num_rows, w1[0].shape[1]), dtype=dtype)
    a = x.new_empty((num_rows, w2[0].shape[2]), dtype=dtype)
    sizes = torch.empty(num_experts, dtype=torch.int64)
    y = x.new_empty((num_rows, w2[0].shape[1]), dtype=dtype)
    if r.compute is Compute.BF16:
        return y, [sizes, h, a]
    kept_x = [] if x_scales is not None else empty_kept(x, Activation.EXPERT_INPUT, r, num_experts)
    kept_h = [h]
    if r.keeps_fp4(Activation.SWIGLU_INPUT):
        columns = h.shape[1]
        kept_h = [h.new_empty((num_rows, columns // n), dtype=torch.uint8) for n in (2, FP4_BLOCK)]
    return y, [sizes, *kept_h, *empty_kept(a, Activation.DOWN_INPUT, r, num_experts), *kept_x]


def _experts(
    x: Tensor,
    x_scales: Tensor | None,
    probs: Tensor | None,
    w1: list[Tensor],
    w2: list[Tensor],
    group_sizes: Tensor,
    seed: Tensor | None,
    recipe: str,
    gemm: str,
    static_shapes: bool,
) -> tuple[Tensor, list[Tensor]]:
    """(y [R, H], kept): kept is the group sizes on the CPU, then what is kept of h, of a and, unless x is MXFP4, of x.

    Args:
        x: [R, H] in bfloat16 (any float for compute BF16); or packed E2M1 codes with x_scales of E8M0 codes; or E4M3
            codes with x_scales in float32, a power of two for each 128.
        probs: float32 [R], or None for 1.
        w1, w2: the weights [E, 2F, H], [E, H, F] for compute BF16, else the tensors of their `Fp8Weight`.
    """
    r = recipe_of(recipe)
    backend = Gemm(gemm)
    groups = Groups.from_tensor(group_sizes, x.shape[0], device=x.device)
    sizes = groups.sizes
    host_sizes = torch.tensor(sizes, dtype=torch.int64)
    if r.compute is Compute.BF16:
        h = grouped_gemm(x, w1[0], groups, gemm=backend, out_dtype=x.dtype)
        show(Activation.SWIGLU_INPUT, h)
        a = swiglu(h, probs)
        show(Activation.DOWN_INPUT, a)
        return grouped_gemm(a, w2[0], groups, gemm=backend, out_dtype=x.dtype), [host_sizes, h, a]

    kept_x: list[Tensor] = []
    if x_scales is not None:
        rows = rows_of_tokens(x, x_scales, r, sizes)
    else:
        rows, kept_x = quantize_input(x, Activation.EXPERT_INPUT, r, sizes, seed_of(seed, 0))
    h = grouped_gemm(rows, Fp8Weight(*w1).tiles(), groups, gemm=backend)
    del rows
    show(Activation.SWIGLU_INPUT, h)
    a = swiglu(h, probs)
    show(Activation.DOWN_INPUT, a)
    kept_h = list(to_fp4(h, r, seed_of(seed, 1))) if r.keeps_fp4(Activation.SWIGLU_INPUT) else [h]
    del h
    rows, kept_a = quantize_input(a, Activation.DOWN_INPUT, r, sizes, seed_of(seed, 2))
    if static_shapes:
        kept_a, kept_x = (grown(kept, x.shape[0]) if len(kept) == 3 else kept for kept in (kept_a, kept_x))
    del a
    return grouped_gemm(rows, Fp8Weight(*w2).tiles(), groups, gemm=backend), [host_sizes, *kept_h, *kept_a, *kept_x]


def _experts_backward_fake(
    dy: Tensor,
    x: Tensor | None,
    x_scales: Tensor | None,
    probs: Tensor | None,
    kept: list[Tensor],
    w1: list[Tensor],
    w2: list[Tensor],
    seed: Tensor | None,
    recipe: str,
    gemm: str,
    weight_dtype: torch.dtype,
    needs: Sequence[bool],
    dy_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    need_dx, need_dprobs, need_dw1, need_dw2 = needs
    dtype = dy.dtype if dy_scales is None else torch.bfloat16
    nothing = dy.new_empty(0, dtype=dtype)
    return (
        dy.new_empty((dy.shape[0], w1[0].shape[2]), dtype=dtype) if need_dx else nothing,
        torch.empty_like(probs) if need_dprobs and probs is not None else nothing,
        dy.new_empty(w1[0].shape, dtype=weight_dtype) if need_dw1 else nothing,
        dy.new_empty(w2[0].shape, dtype=weight_dtype) if need_dw2 else nothing,
    )


def _experts_backward(
    dy: Tensor,
    x: Tensor | None,
    x_scales: Tensor | None,
    probs: Tensor | None,
    kept: list[Tensor],
    w1: list[Tensor],
    w2: list[Tensor],
    seed: Tensor | None,
    recipe: str,
    gemm: str,
    weight_dtype: torch.dtype,
    needs: Sequence[bool],
    dy_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dprobs, dw1, dw2); an empty tensor for what is not needed. x: None where the forward kept it otherwise.

    dy: [R, H] in the dtype of y; or, for compute FP8, codes with dy_scales, as x in the forward.
    """
    r = recipe_of(recipe)
    backend = Gemm(gemm)
    need_dx, need_dprobs, need_dw1, need_dw2 = needs
    host_sizes, *rest = kept
    groups = Groups.from_tensor(host_sizes, dy.shape[0], device=dy.device)
    sizes = groups.sizes
    dx = dw1 = dw2 = nothing = dy.new_empty(0, dtype=dy.dtype if dy_scales is None else torch.bfloat16)
    dy = dy.contiguous()
    if r.compute is Compute.BF16:
        h, a = rest
        da = grouped_gemm(dy, w2[0].transpose(1, 2), groups, gemm=backend, out_dtype=dy.dtype)
        if need_dw2:
            dw2 = grouped_wgrad(dy, a, groups, gemm=backend, out_dtype=weight_dtype)
        dh, dprobs = swiglu_backward(da, h, probs)
        del da
        if need_dx:
            dx = grouped_gemm(dh, w1[0].transpose(1, 2), groups, gemm=backend, out_dtype=dy.dtype)
        if need_dw1:
            dw1 = grouped_wgrad(dh, x, groups, gemm=backend, out_dtype=weight_dtype)
        return dx, dprobs if dprobs is not None and need_dprobs else nothing, dw1, dw2

    num_h = 2 if r.keeps_fp4(Activation.SWIGLU_INPUT) else 1
    num_a = 2 if r.keeps_fp4(Activation.DOWN_INPUT) else 3
    kept_h, kept_a, kept_x = rest[:num_h], rest[num_h : num_h + num_a], rest[num_h + num_a :]

    if dy_scales is None:
        rows, cols = quantize_gradient(dy, r, sizes, seed_of(seed, 3))
    else:
        rows, cols = rows_of_tokens(dy, dy_scales, r, sizes), columns_of_tokens(dy, dy_scales, r, sizes)
    da = grouped_gemm(rows, Fp8Weight(*w2).tiles_t(), groups, gemm=backend)
    del rows
    if need_dw2:
        a_cols = columns_of(kept_a, Activation.DOWN_INPUT, r, sizes)
        dw2 = grouped_wgrad(cols, a_cols, groups, gemm=backend, out_dtype=weight_dtype)
        del a_cols
    del cols
    dh, dprobs = swiglu_backward(da, Fp4Rows(*kept_h) if num_h == 2 else kept_h[0], probs)
    del da
    rows, cols = quantize_gradient(dh, r, sizes, seed_of(seed, 4))
    del dh
    if need_dx:
        dx = grouped_gemm(rows, Fp8Weight(*w1).tiles_t(), groups, gemm=backend)
    del rows
    if need_dw1:
        if x is not None and x_scales is not None:
            x_cols = columns_of_tokens(x, x_scales, r, sizes)
        else:
            x_cols = columns_of(kept_x, Activation.EXPERT_INPUT, r, sizes)
        dw1 = grouped_wgrad(cols, x_cols, groups, gemm=backend, out_dtype=weight_dtype)
    return dx, dprobs if dprobs is not None and need_dprobs else nothing, dw1, dw2


experts = operator(
    "moe_experts(Tensor x, Tensor? x_scales, Tensor? probs, Tensor[] w1, Tensor[] w2, Tensor group_sizes, "
    "Tensor? seed, str recipe, str gemm, bool static_shapes) -> (Tensor, Tensor[])",
    cpu=_experts,
    cuda=_experts,
    fake=_experts_fake,
    backward=not_differentiable("moe_experts"),
)
experts_backward = operator(
    "moe_experts_backward(Tensor dy, Tensor? x, Tensor? x_scales, Tensor? probs, Tensor[] kept, Tensor[] w1, "
    "Tensor[] w2, Tensor? seed, str recipe, str gemm, ScalarType weight_dtype, bool[4] needs, Tensor? dy_scales=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_experts_backward,
    cuda=_experts_backward,
    fake=_experts_backward_fake,
    backward=not_differentiable("moe_experts_backward"),
)
