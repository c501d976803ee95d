"""Sums of gathered rows on CUDA. Needs triton, which CUDA builds of torch bring along.

T tokens, K choices a token, R rows, H columns.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64
from torch import Tensor

_NUM_WARPS = 4
_BLOCK_H = 1024  # 16 bytes of bfloat16 a thread


def gather_sum(y_RH: Float[Tensor, "R H"], row_of_TK: Int64[Tensor, "T K"]) -> Float[Tensor, "T H"]:
    """Sum over k of y[row_of[t, k]], k ascending, in float32 (float64: in float64), rounded once. Both contiguous."""
    num_tokens, num_choices = row_of_TK.shape
    num_columns = y_RH.shape[1]
    out_TH = y_RH.new_empty((num_tokens, num_columns))
    if out_TH.numel():
        grid = (num_tokens, triton.cdiv(num_columns, _BLOCK_H))
        sum_dtype = tl.float64 if y_RH.dtype == torch.float64 else tl.float32
        with torch.cuda.device_of(y_RH):
            _gather_sum[grid](
                y_RH, row_of_TK, out_TH, num_columns, num_choices, sum_dtype, _BLOCK_H, num_warps=_NUM_WARPS
            )
    return out_TH


@triton.jit
def _gather_sum(y, row_of, out, num_columns, K: tl.constexpr, SUM: tl.constexpr, BLOCK_H: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = column < num_columns
    # The first row starts the sum: 0 + -0 would lose the sign.
    total = tl.load(y + tl.load(row_of + token * K) * num_columns + column, mask=mask).to(SUM)
    for k in tl.static_range(1, K):
        row = tl.load(row_of + token * K + k)
        total += tl.load(y + row * num_columns + column, mask=mask).to(SUM)
    tl.store(out + token * num_columns + column, total.to(out.dtype.element_ty), mask=mask)
