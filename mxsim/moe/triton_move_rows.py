"""Rows of one matrix to other rows of another, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 1024


def move_rows(source: Tensor, out: Tensor, index: Tensor, *, scatter: bool) -> None:
    """out[r] = source[index[r]]; with scatter out[index[r]] = source[r].

    Both are matrices of the same integers, rows of any stride, the elements of a row one after another.
    """
    num_rows, num_columns = len(index), source.shape[1]
    if num_rows == 0 or num_columns == 0:
        return
    with torch.cuda.device_of(source):
        _move_rows[num_rows,](
            source,
            out,
            index,
            num_columns,
            source.stride(0),
            out.stride(0),
            scatter,
            min(_MAX_BLOCK, triton.next_power_of_2(num_columns)),
        )


@triton.jit
def _move_rows(
    source,
    out,
    index,
    COLUMNS: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,  # constants: whole 16 bytes are moved where they divide it
    OUT_STRIDE: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    other = tl.load(index + row)
    if SCATTER:
        first, last = row, other
    else:
        first, last = other, row
    for start in range(0, COLUMNS, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < COLUMNS
        x = tl.load(source + first * SOURCE_STRIDE + columns, mask=inside)
        tl.store(out + last * OUT_STRIDE + columns, x, mask=inside)
