"""SwiGLU on CUDA, each direction in one pass over its rows. Needs triton, which CUDA builds of torch bring along.

float32 arithmetic: each product is within 2**-17 of exact where exp(-|gate|) is normal, |gate| <= 87.

R rows, F intermediate size; h_R2F has the gate in its first F columns and the up projection in the last F.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

_NUM_WARPS = 4
_BLOCK_F = 1024  # 8 elements a thread: 16 bytes of bfloat16, 4 of FP4 codes


def forward(h_R2F: Float[Tensor, "R 2F"], probs_R: Float[Tensor, " R"] | None) -> Float[Tensor, "R F"]:
    """As `swiglu`, of bfloat16, float16 or float32; all contiguous."""
    num_rows, num_columns = h_R2F.shape[0], h_R2F.shape[1] // 2
    a_RF = h_R2F.new_empty((num_rows, num_columns))
    if a_RF.numel():
        with torch.cuda.device_of(h_R2F):
            _forward[num_rows, triton.cdiv(num_columns, _BLOCK_F)](
                h_R2F, probs_R, a_RF, num_columns, probs_R is not None, _BLOCK_F, num_warps=_NUM_WARPS
            )
    return a_RF


def backward(
    da_RF: Float[Tensor, "R F"],
    h: Float[Tensor, "R 2F"] | UInt8[Tensor, "R F"],
    scales: UInt8[Tensor, "R F/16"] | None,
    probs_R: Float[Tensor, " R"] | None,
) -> tuple[Float[Tensor, "R 2F"], Float[Tensor, " n"]]:
    """As `swiglu_backward`, h being the codes where scales are given; n is R, or 0 without probs. All contiguous."""
    num_rows, num_columns = da_RF.shape
    dh_R2F = da_RF.new_empty((num_rows, 2 * num_columns))
    # No columns: sums of nothing.
    dprobs_R = da_RF.new_zeros if num_columns == 0 else da_RF.new_empty
    dprobs = dprobs_R((0 if probs_R is None else num_rows,), dtype=torch.float32)
    if da_RF.numel():
        with torch.cuda.device_of(da_RF):
            _backward[(num_rows,)](
                da_RF,
                h,
                scales,
                probs_R,
                dh_R2F,
                dprobs,
                num_columns,
                scales is not None,
                probs_R is not None,
                _BLOCK_F,
                num_warps=_NUM_WARPS,
            )
    return dh_R2F, dprobs


@triton.jit
def _forward(h, probs, a, F, HAS_PROBS: tl.constexpr, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = column < F
    gate = tl.load(h + row * 2 * F + column, mask=mask, other=0).to(tl.float32)
    up = tl.load(h + row * 2 * F + F + column, mask=mask, other=0).to(tl.float32)
    s, _ = _sigmoid(gate)
    result = gate * s * up
    if HAS_PROBS:
        result *= tl.load(probs + row)
    tl.store(a + row * F + column, result.to(a.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    da, h, scales, probs, dh, dprobs, F, IS_FP4: tl.constexpr, HAS_PROBS: tl.constexpr, BLOCK_F: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_sum = tl.zeros((BLOCK_F,), tl.float32)
    for start in range(0, F, BLOCK_F):
        column = start + tl.arange(0, BLOCK_F)
        mask = column < F
        if IS_FP4:
            pair = start // 2 + tl.arange(0, BLOCK_F // 2)
            gate = _fp4_values(h + row * F, scales + row * (F // 16), pair, pair < F // 2)
            up = _fp4_values(h + row * F, scales + row * (F // 16), F // 2 + pair, pair < F // 2)
        else:
            gate = tl.load(h + row * 2 * F + column, mask=mask, other=0).to(tl.float32)
            up = tl.load(h + row * 2 * F + F + column, mask=mask, other=0).to(tl.float32)
        grad = tl.load(da + row * F + column, mask=mask, other=0).to(tl.float32)
        s, one_minus_s = _sigmoid(gate)
        silu = gate * s
        if HAS_PROBS:
            row_sum += grad * silu * up
            grad *= tl.load(probs + row)
        dgate = grad * up * (s * (1 + gate * one_minus_s))
        dtype = dh.dtype.element_ty
        tl.store(dh + row * 2 * F + column, dgate.to(dtype), mask=mask)
        tl.store(dh + row * 2 * F + F + column, (grad * silu).to(dtype), mask=mask)
    if HAS_PROBS:
        tl.store(dprobs + row, tl.sum(row_sum, 0))


@triton.jit
def _sigmoid(x):
    """(sigmoid(x), 1 - sigmoid(x)): from exp(-|x|), which never overflows."""
    e = tl.exp(-tl.abs(x))
    large = 1 / (1 + e)
    small = e * large
    return tl.where(x < 0, small, large), tl.where(x < 0, large, small)


@triton.jit
def _fp4_values(codes, scales, pair, mask):
    """Elements 2 * pair and 2 * pair + 1 of one row, dequantized; a NaN scale gives NaN. Masked: 0."""
    byte = tl.load(codes + pair, mask=mask, other=0).to(tl.int32)
    code = tl.load(scales + pair // 16, mask=mask, other=127).to(tl.int32)
    # Bits of 2**(code - 127): 2**-127 is a subnormal.
    scale = tl.where(code == 0, 0x00400000, tl.where(code == 255, 0x7FC00000, code << 23)).to(tl.float32, bitcast=True)
    return tl.interleave(_e2m1(byte & 15) * scale, _e2m1(byte >> 4) * scale)


@triton.jit
def _e2m1(code):
    """Value of a code: exponent bits 2**(1 - 1) upward, one fraction bit; magnitude 1 is the subnormal 0.5."""
    magnitude = code & 7
    normal = ((magnitude >> 1) + 126 << 23) | (magnitude & 1) << 22
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, normal) | (code & 8) << 28
    return bits.to(tl.float32, bitcast=True)
