"""Chains of conversions that an activation may go through: BF16 -> FP4 or FP8 rows, then FP8 rows or columns."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import ml_dtypes
import numpy as np

from mxsim.analysis.published_transpose import published_fp8_transpose
from mxsim.blocks import (
    FP8_1X128,
    MXFP4,
    BlockFormat,
    BlockTensor,
    ScaleRule,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_row_to_fp8_col,
    quantize,
)

_BLOCK = FP8_1X128.block_size


class Part(Enum):
    """A part of the error of a chain: what the step from one state to the next adds; see `decompose`."""

    UNDERFLOW = "underflow"
    GRID = "grid rounding"
    SCALE_RULE = "scale rule"
    CLIPPING = "clipping"
    SECOND_ROUNDING = "second rounding"
    TRANSPOSE = "transpose"
    FP32_OUTPUT = "FP32 output"
    ACCUMULATION = "accumulation"


@dataclass(frozen=True)
class Conversion:
    """A step from one block tensor to the next, and the part of the error that is its own."""

    part: Part
    convert: Callable[[BlockTensor], BlockTensor]


@dataclass(frozen=True)
class Chain:
    """Quantize rows to fmt by scale_rule (None: the format's own), then convert, step by step.

    A conversion to columns must be the last: its result is transposed.
    """

    name: str
    fmt: BlockFormat
    conversions: tuple[Conversion, ...] = ()
    scale_rule: ScaleRule | None = None

    def __str__(self) -> str:
        return self.name


def through_bf16_to_row(t: BlockTensor) -> BlockTensor:
    """Dequantize to BF16 and quantize to FP8 rows, with the scale of the new amax."""
    with np.errstate(invalid="ignore"):
        return quantize(t.dequantize(ml_dtypes.bfloat16), FP8_1X128)


def through_bf16_to_col(t: BlockTensor) -> BlockTensor:
    """Dequantize rows [m, K] to BF16, transpose, quantize to FP8 columns [K, ceil128(m)], scales of the new amax."""
    rows = t.dequantize(ml_dtypes.bfloat16)
    rows = rows.reshape(-1, rows.shape[-1])
    columns = np.zeros((rows.shape[1], -(-rows.shape[0] // _BLOCK) * _BLOCK), rows.dtype)
    columns[:, : rows.shape[0]] = rows.T
    new = quantize(columns, FP8_1X128)
    return BlockTensor(new.codes, new.scales, FP8_1X128, source_rows=rows.shape[0])


def _row(headroom: int) -> Conversion:
    return Conversion(Part.SECOND_ROUNDING, partial(fp4_row_to_fp8_row, headroom=headroom))


def _col(headroom: int) -> Conversion:
    return Conversion(Part.SECOND_ROUNDING, partial(fp4_row_to_fp8_col, headroom=headroom))


_PUBLISHED = Conversion(Part.TRANSPOSE, published_fp8_transpose)

CHAINS = {
    chain.name: chain
    for chain in (
        Chain("FP4", MXFP4),
        *(Chain(f"FP4 -> FP8 row, headroom {h}", MXFP4, (_row(h),)) for h in (0, 6)),
        Chain("FP4 -> BF16 -> FP8 row", MXFP4, (Conversion(Part.SECOND_ROUNDING, through_bf16_to_row),)),
        *(Chain(f"FP4 -> FP8 column, headroom {h}", MXFP4, (_col(h),)) for h in (0, 6)),
        Chain("FP4 -> BF16 -> FP8 column", MXFP4, (Conversion(Part.SECOND_ROUNDING, through_bf16_to_col),)),
        *(Chain(f"FP4 -> FP8 row, headroom {h} -> published column", MXFP4, (_row(h), _PUBLISHED)) for h in (0, 6)),
        Chain("FP8 row", FP8_1X128),
        Chain("FP8 row -> FP8 column", FP8_1X128, (Conversion(Part.TRANSPOSE, fp8_row_to_fp8_col),)),
        Chain("FP8 row -> BF16 -> FP8 column", FP8_1X128, (Conversion(Part.TRANSPOSE, through_bf16_to_col),)),
        Chain("FP8 row -> published column", FP8_1X128, (_PUBLISHED,)),
    )
}
