"""Blocks that share a scale: formats, quantize and dequantize, direct FP4 <-> FP8 conversions, FP8 GEMM. NumPy only."""

from mxsim.blocks.block_format import (
    BLOCK_FORMATS,
    FP8_1X128,
    FP8_128X1,
    FP8_128X128,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    BlockFormat,
)
from mxsim.blocks.convert import (
    count_inexact,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_row_to_fp4_row,
    fp8_row_to_fp8_col,
)
from mxsim.blocks.gemm import EXACT, FP32_SEQUENTIAL, HOPPER, Accumulator, PromotionOrder, fp8_gemm
from mxsim.blocks.quantize import NonFinite, ScaleOrder, quantize
from mxsim.blocks.scale_rule import ScaleRule, scale_exponent
from mxsim.blocks.tensor import BlockTensor, dequantize

__all__ = [
    "BLOCK_FORMATS",
    "EXACT",
    "FP32_SEQUENTIAL",
    "FP8_1X128",
    "FP8_128X1",
    "FP8_128X128",
    "HOPPER",
    "MXFP4",
    "MXFP6_E2M3",
    "MXFP6_E3M2",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "MXINT8",
    "NVFP4",
    "Accumulator",
    "BlockFormat",
    "BlockTensor",
    "NonFinite",
    "PromotionOrder",
    "ScaleOrder",
    "ScaleRule",
    "count_inexact",
    "dequantize",
    "fp4_row_to_fp8_col",
    "fp4_row_to_fp8_row",
    "fp8_gemm",
    "fp8_row_to_fp4_row",
    "fp8_row_to_fp8_col",
    "quantize",
    "scale_exponent",
]
