"""The recipes by the NumPy simulator and float64: what each GEMM must be given, and what it must return."""

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from mxsim.blocks import (
    FP8_1X128,
    FP8_128X128,
    MXFP4,
    BlockTensor,
    dequantize,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    quantize,
)
from mxsim.moe import Activation, Compute, Conversion, Gradients, Recipe


def to_numpy(x: Tensor) -> np.ndarray:
    """The same bits; bfloat16 as ml_dtypes.bfloat16."""
    x = x.detach().cpu().contiguous()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def input_rows(x: np.ndarray, activation: Activation, recipe: Recipe) -> BlockTensor:
    """What the forward GEMM reads of one expert's rows."""
    if recipe.keeps_fp4(activation):
        return rows_of_fp4(quantize(x, MXFP4, scale_rule=recipe.scale_rule), recipe)
    return quantize(x, FP8_1X128)


def input_columns(x: np.ndarray, activation: Activation, recipe: Recipe) -> BlockTensor:
    """What Wgrad reads of one expert's rows, [K, ceil128(m)]."""
    if recipe.keeps_fp4(activation):
        return columns_of_fp4(quantize(x, MXFP4, scale_rule=recipe.scale_rule), recipe)
    return fp8_columns(x)


def rows_of_fp4(fp4: BlockTensor, recipe: Recipe) -> BlockTensor:
    """FP8 rows of MXFP4 rows, directly or by way of bfloat16."""
    if recipe.conversion is Conversion.THROUGH_BF16:
        return quantize(dequantize(fp4, dtype=ml_dtypes.bfloat16), FP8_1X128)
    return fp4_row_to_fp8_row(fp4, headroom=recipe.headroom)


def columns_of_fp4(fp4: BlockTensor, recipe: Recipe) -> BlockTensor:
    """FP8 columns of MXFP4 rows, directly or by way of bfloat16."""
    if recipe.conversion is Conversion.THROUGH_BF16:
        return fp8_columns(dequantize(fp4, dtype=ml_dtypes.bfloat16))
    return fp4_row_to_fp8_col(fp4, headroom=recipe.headroom)


def fp8_columns(x: np.ndarray) -> BlockTensor:
    """FP8 columns of bfloat16 rows, [N, ceil128(m)]."""
    padded = np.zeros((-(-x.shape[0] // 128) * 128, x.shape[1]), x.dtype)
    padded[: len(x)] = x
    return quantize(np.ascontiguousarray(padded.T), FP8_1X128)


def gradient_rows(dy: np.ndarray, recipe: Recipe) -> BlockTensor:
    """What Dgrad reads of a gradient."""
    if recipe.gradients is Gradients.MXFP4:
        return rows_of_fp4(quantize(dy, MXFP4, scale_rule=recipe.scale_rule), recipe)
    return quantize(dy, FP8_1X128)


def gradient_columns(dy: np.ndarray, recipe: Recipe) -> BlockTensor:
    """What Wgrad reads of a gradient, [N, ceil128(m)]."""
    if recipe.gradients is Gradients.MXFP4:
        return columns_of_fp4(quantize(dy, MXFP4, scale_rule=recipe.scale_rule), recipe)
    return fp8_columns(dy)


def weight(w: np.ndarray) -> BlockTensor:
    """A weight matrix in tiles."""
    return quantize(w, FP8_128X128)


def stored_swiglu_input(h: np.ndarray, recipe: Recipe) -> np.ndarray:
    """h as SwiGLU's backward pass sees it."""
    if recipe.keeps_fp4(Activation.SWIGLU_INPUT):
        return dequantize(quantize(h, MXFP4, scale_rule=recipe.scale_rule), dtype=ml_dtypes.bfloat16)
    return h


def values(t: BlockTensor) -> np.ndarray:
    """float64, exact."""
    return t.dequantize(np.float64)


# --------------------------------------------------------------------------------- the whole layer, float64 throughout
def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def expert_reference(
    x: np.ndarray, probs: np.ndarray, w1: np.ndarray, w2: np.ndarray, dy: np.ndarray, recipe: Recipe
) -> dict[str, np.ndarray]:
    """y, dx, dprobs, dw1, dw2 of one expert: explicit fake quantization, float64 between the quantizations.

    Activations and gradients between GEMMs are rounded to bfloat16, as every recipe stores them.
    """

    def bf16(v: np.ndarray) -> np.ndarray:
        return v.astype(ml_dtypes.bfloat16)

    def wide(v: np.ndarray) -> np.ndarray:
        return v.astype(np.float64)

    fp8 = recipe.compute is Compute.FP8
    w1_hat, w2_hat = (values(weight(w)) if fp8 else wide(w) for w in (w1, w2))
    x_rows = values(input_rows(x, Activation.EXPERT_INPUT, recipe)) if fp8 else wide(x)
    h = bf16(x_rows @ w1_hat.T)
    gate, up = np.split(wide(h), 2, axis=1)
    a = bf16(silu(gate) * up * probs[:, None])
    a_rows = values(input_rows(a, Activation.DOWN_INPUT, recipe)) if fp8 else wide(a)
    y = bf16(a_rows @ w2_hat.T)

    m = len(x)
    da = bf16((values(gradient_rows(dy, recipe)) if fp8 else wide(dy)) @ w2_hat)
    if fp8:
        dw2 = values(gradient_columns(dy, recipe)) @ values(input_columns(a, Activation.DOWN_INPUT, recipe)).T
    else:
        dw2 = wide(dy).T @ wide(a)
    gate, up = np.split(wide(stored_swiglu_input(h, recipe)), 2, axis=1)
    s = 1 / (1 + np.exp(-gate))
    grad = wide(da) * probs[:, None]
    dh = bf16(np.concatenate([grad * up * s * (1 + gate * (1 - s)), grad * gate * s], axis=1))
    dprobs = (wide(da) * gate * s * up).sum(1)
    dx = bf16((values(gradient_rows(dh, recipe)) if fp8 else wide(dh)) @ w1_hat)
    if fp8:
        dw1 = values(gradient_columns(dh, recipe)) @ values(input_columns(x, Activation.EXPERT_INPUT, recipe)).T
    else:
        dw1 = wide(dh).T @ wide(x)
    assert y.shape[0] == m
    return {"y": wide(y), "dx": wide(dx), "dprobs": dprobs, "dw1": dw1, "dw2": dw2}
