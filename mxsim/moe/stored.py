"""GEMM operands of the FP8 recipes: what is quantized, what is kept for the backward pass, what is read from it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mxsim import kernels
from mxsim.kernels import Fp4Rows, Fp8Cols, RaggedFp8Rows
from mxsim.kernels.layouts import FP4_BLOCK, FP8_BLOCK, max_column_blocks
from mxsim.moe.recipe import Activation, Conversion, Gradients, Recipe


def to_fp4(x: Tensor, recipe: Recipe, seed: int | None) -> Fp4Rows:
    """x in MXFP4 by the recipe's scale rule and rounding; seed: of its random bits where the rounding is STOCHASTIC."""
    return kernels.bf16_to_fp4_row(x, scale_rule=recipe.scale_rule, rounding=recipe.rounding, seed=seed)


def quantize_input(
    x: Tensor, activation: Activation, recipe: Recipe, sizes: Sequence[int], seed: int | None
) -> tuple[RaggedFp8Rows, list[Tensor]]:
    """Rows for the forward GEMM, and what is kept of the activation: MXFP4 rows, or FP8 columns.

    Kept in MXFP4, x is quantized once and the rows hold the values of those codes. Otherwise x is quantized twice.
    """
    if not recipe.keeps_fp4(activation):
        return kernels.bf16_to_fp8_row(x, group_sizes=sizes), list(kernels.bf16_to_fp8_col(x, group_sizes=sizes))
    fp4, rows = _fp4_and_rows(x, recipe, sizes, seed)
    return rows, list(fp4)


def _fp4_and_rows(x: Tensor, recipe: Recipe, sizes: Sequence[int], seed: int | None) -> tuple[Fp4Rows, RaggedFp8Rows]:
    if recipe.conversion is Conversion.THROUGH_BF16:
        fp4 = to_fp4(x, recipe, seed)
        return fp4, rows_from_fp4(fp4, recipe, sizes)
    fp4, rows = kernels.bf16_to_fp4_and_fp8_row(
        x,
        scale_rule=recipe.scale_rule,
        headroom=recipe.headroom,
        group_sizes=sizes,
        rounding=recipe.rounding,
        seed=seed,
    )
    return fp4, rows


def rows_from_fp4(fp4: Fp4Rows, recipe: Recipe, sizes: Sequence[int]) -> RaggedFp8Rows:
    """Rows for the forward GEMM (of a gradient: for Dgrad) from MXFP4 codes."""
    if recipe.conversion is Conversion.THROUGH_BF16:
        return kernels.bf16_to_fp8_row(kernels.fp4_to_bf16(*fp4), group_sizes=sizes)
    return kernels.fp4_row_to_fp8_row(*fp4, headroom=recipe.headroom, group_sizes=sizes)


def rows_of_tokens(codes: Tensor, scales: Tensor, recipe: Recipe, sizes: Sequence[int]) -> RaggedFp8Rows:
    """Rows for the forward GEMM from tokens in MXFP4, or in FP8 (scales float32)."""
    if scales.dtype is torch.float32:
        return kernels.fp8_row_to_ragged(codes, scales, group_sizes=sizes)
    return rows_from_fp4(Fp4Rows(codes, scales), recipe, sizes)


def columns_of_tokens(codes: Tensor, scales: Tensor, recipe: Recipe, sizes: Sequence[int]) -> Fp8Cols:
    """Columns for Wgrad from tokens in MXFP4, or in FP8 (scales float32; codes are rounded again where they must)."""
    if scales.dtype is torch.float32:
        return kernels.fp8_row_to_fp8_col(codes, scales, group_sizes=sizes)
    return columns_from_fp4(Fp4Rows(codes, scales), recipe, sizes)


def columns_of(kept: Sequence[Tensor], activation: Activation, recipe: Recipe, sizes: Sequence[int]) -> Fp8Cols:
    """Columns for Wgrad from what `quantize_input` kept."""
    return columns_from_fp4(Fp4Rows(*kept), recipe, sizes) if recipe.keeps_fp4(activation) else Fp8Cols(*kept)


def columns_from_fp4(fp4: Fp4Rows, recipe: Recipe, sizes: Sequence[int]) -> Fp8Cols:
    """Columns for Wgrad from MXFP4 codes."""
    if recipe.conversion is Conversion.THROUGH_BF16:
        return kernels.bf16_to_fp8_col(kernels.fp4_to_bf16(*fp4), group_sizes=sizes)
    return kernels.fp4_row_to_fp8_col(*fp4, headroom=recipe.headroom, group_sizes=sizes)


def quantize_gradient(
    dy: Tensor, recipe: Recipe, sizes: Sequence[int], seed: int | None
) -> tuple[RaggedFp8Rows, Fp8Cols]:
    """FP8 rows (Dgrad) and FP8 columns (Wgrad) of a gradient: both from its BF16 values, or both from its MXFP4."""
    if recipe.gradients is Gradients.MXFP4:
        fp4, rows = _fp4_and_rows(dy, recipe, sizes, seed)
        return rows, columns_from_fp4(fp4, recipe, sizes)
    return kernels.bf16_to_fp8_row(dy, group_sizes=sizes), kernels.bf16_to_fp8_col(dy, group_sizes=sizes)


def grown(kept: list[Tensor], num_rows: int) -> list[Tensor]:
    """Kept columns in buffers that suffice for any group sizes: under torch.compile no shape may depend on data."""
    codes, scales, padded_sizes = kept
    num_columns = scales.shape[1]
    blocks = max_column_blocks(num_rows, len(padded_sizes))
    big = [codes.new_zeros(num_columns * blocks * FP8_BLOCK), scales.new_ones(blocks, num_columns)]
    big[0][: len(codes)] = codes
    big[1][: len(scales)] = scales
    return [*big, padded_sizes]


def empty_fp4(x: Tensor) -> list[Tensor]:
    """Tensors of the shapes of x in MXFP4."""
    num_rows, num_columns = x.shape
    return [x.new_empty((num_rows, num_columns // n), dtype=torch.uint8) for n in (2, FP4_BLOCK)]


def empty_kept(x: Tensor, activation: Activation, recipe: Recipe, num_groups: int) -> list[Tensor]:
    """Tensors of the shapes that `quantize_input` keeps, grown."""
    num_rows, num_columns = x.shape
    if recipe.keeps_fp4(activation):
        return empty_fp4(x)
    blocks = max_column_blocks(num_rows, num_groups)
    return [
        x.new_empty((num_columns * blocks * FP8_BLOCK,), dtype=torch.float8_e4m3fn),
        x.new_empty((blocks, num_columns), dtype=torch.float32),
        x.new_empty((num_groups,), dtype=torch.int64),
    ]
