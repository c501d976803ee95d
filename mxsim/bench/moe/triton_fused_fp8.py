"""BF16 -> FP8 rows and columns in one read: the baseline that two kernels are up against. Needs triton.

R rows, K columns, both multiples of 128.  Computes: NUMERICS 7, bit-equal to `kernels.bf16_to_fp8_row` and
`kernels.bf16_to_fp8_col`.  Work split: a program for each 128 x 128 tile.  Traffic: 2 + 1 + 1 bytes an element.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import BFloat16
from torch import Tensor

from mxsim.kernels.layouts import FP8_BLOCK, Fp8Cols, Fp8Rows, empty_fp8_cols, empty_fp8_rows


def bf16_to_fp8_row_and_col(x: BFloat16[Tensor, "R K"], num_warps: int) -> tuple[Fp8Rows, Fp8Cols]:
    """Both of a contiguous x."""
    num_rows, num_columns = x.shape
    row_codes, row_scales = empty_fp8_rows(x.shape, x.device)
    col_codes, col_scales = empty_fp8_cols(num_rows // FP8_BLOCK, num_columns, x.device)
    with torch.cuda.device_of(x):
        _row_and_col[num_columns // FP8_BLOCK, num_rows // FP8_BLOCK](
            x.view(torch.int16),
            row_codes.view(torch.uint8),
            row_scales,
            col_codes.view(torch.uint8),
            col_scales,
            num_rows,
            num_columns,
            FP8_BLOCK,
            num_warps=num_warps,
        )
    return Fp8Rows(row_codes, row_scales), Fp8Cols(col_codes, col_scales)


@triton.jit
def _scale_and_inverse(amax_bits):
    """The smallest power of two s with amax <= 448 * s, at least 2**-127, and 1/s; bits of bfloat16 to float32.

    amax = 1.m * 2**e gives s = 2**(e - 8), twice that where 1.m > 1.75. amax = 0: s = 1; infinite or NaN: NaN.
    """
    exponent = tl.maximum((amax_bits >> 7) - 8 + ((amax_bits & 0x7F) > 0x60).to(tl.int32), 0)  # biased
    scale = tl.where(exponent > 0, exponent << 23, 0x00400000)  # 2**-127 is a subnormal
    inverse = (254 - exponent) << 23
    scale = tl.where(amax_bits == 0, 0x3F800000, tl.where(amax_bits >= 0x7F80, 0x7FC00000, scale))
    inverse = tl.where(amax_bits == 0, 0x3F800000, inverse)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def _codes(values, inverse, amax_bits):
    """E4M3 of values / scale, which is exact before it is rounded; 0x7F in a block with NaN or infinity."""
    codes = (values * inverse).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(amax_bits >= 0x7F80, 0x7F, codes).to(tl.uint8)


@triton.jit
def _row_and_col(x, row_codes, row_scales, col_codes, col_scales, R, K, BLOCK: tl.constexpr):
    block_k, block_r = tl.program_id(0), tl.program_id(1)
    r = block_r.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k = block_k.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x + r[:, None] * K + k[None, :]).to(tl.int32)
    values = (bits << 16).to(tl.float32, bitcast=True)
    magnitudes = bits & 0x7FFF  # ordered as the numbers are, NaN on top

    amax = tl.max(magnitudes, 1)
    scale, inverse = _scale_and_inverse(amax)
    tl.store(row_scales + block_k * R + r, scale)
    tl.store(row_codes + r[:, None] * K + k[None, :], _codes(values, inverse[:, None], amax[:, None]))

    amax = tl.max(magnitudes, 0)
    scale, inverse = _scale_and_inverse(amax)
    tl.store(col_scales + block_r * K + k, scale)
    codes = tl.trans(_codes(values, inverse[None, :], amax[None, :]))
    tl.store(col_codes + k[:, None] * R + r[None, :], codes)
