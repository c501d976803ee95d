"""Grouped FP8 GEMMs in one launch for all experts. Needs triton, which CUDA builds of torch bring along.

    rows    out[r] = a[r] @ b[e].T for the rows r of expert e; a in blocks of 1x128, b in tiles of 128x128
    wgrad   out[e] = a_e @ b_e.T over the rows of expert e; both in blocks of 1x128

Bits: those of NUMERICS 9. A block of 128 elements of K is one dot product of the tensor cores from an accumulator of
zero; it is promoted to FP32 by one FMA, in the order of the scales that `scaled_mm` has.

Work split: a program computes one tile of the result, BLOCK_M x BLOCK_N. Programs that run at the same time share
operands in L2: the rows of an expert go by runs of up to 16 tiles, and a run passes over all columns of b before the
next. Which rows a program has is looked up in a small table (`tiles_of`), made on the host, where the sizes are known.
"""

from contextvars import copy_context
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mxsim.kernels.layouts import FP8_BLOCK, Fp8Cols, Fp8Tiles, RaggedFp8Rows, ceil_div
from mxsim.moe.groups import Groups
from mxsim.moe.ragged import ROW_MULTIPLE

_RUN = 16  # tiles of rows that pass over b together
_ENTRY = tl.constexpr(8)  # integers for each tile in the table


class Config(NamedTuple):
    """How a kernel is cut up.

    tma: operands come by the bulk tensor copy engine (compute capability 9.0). In wgrad, where the length of a row
    differs from expert to expert, every program writes its own descriptors first.
    max_registers: of a thread; 128 with 8 warps lets two programs share a multiprocessor.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    max_registers: int | None = None


# The fastest of benchmarks/probe_grouped_gemm.py on an H200, for few large and many small experts alike.
ROWS_CONFIG = Config(64, 128, 4, 3, tma=True)
WGRAD_CONFIG = Config(64, 128, 4, 3)


def rows(
    a: RaggedFp8Rows, b: Fp8Tiles, groups: Groups, out_dtype: torch.dtype, *, config: Config = ROWS_CONFIG
) -> Tensor:
    """[R, N]; arguments are checked already, no matrix is empty."""
    num_groups, num_columns, depth = b.codes.shape
    out = torch.empty((groups.num_rows, num_columns), dtype=out_dtype, device=a.codes.device)
    tiles = groups.made(("tiles", config.block_m), lambda: groups.on_device(tiles_of(groups, config.block_m)))
    a_codes, b_codes = a.codes, b.codes.view(num_groups * num_columns, depth)
    tma = config.tma and a_codes.data_ptr() % 16 == 0 and b_codes.data_ptr() % 16 == 0
    if tma:
        a_codes = TensorDescriptor.from_tensor(a_codes, [config.block_m, FP8_BLOCK])
        b_codes = TensorDescriptor.from_tensor(b_codes, [config.block_n, FP8_BLOCK])
    num_column_tiles = ceil_div(num_columns, config.block_n)
    with torch.cuda.device_of(out):
        _rows[(len(tiles) // _ENTRY.value * num_column_tiles,)](
            a_codes,
            a.scales,
            b_codes,
            b.scales,
            out,
            tiles,
            num_columns,
            depth,
            num_column_tiles,
            b.scales.stride(0),
            b.scales.stride(1),
            config.block_m,
            config.block_n,
            tma,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            maxnreg=config.max_registers,
        )
    return out


def wgrad(a: Fp8Cols, b: Fp8Cols, groups: Groups, out_dtype: torch.dtype, *, config: Config = WGRAD_CONFIG) -> Tensor:
    """[E, M, N]; arguments are checked already, no matrix is empty."""
    m, n = a.scales.shape[1], b.scales.shape[1]
    out = torch.empty((groups.num_groups, m, n), dtype=out_dtype, device=a.codes.device)
    bounds = groups.made("blocks", lambda: groups.on_device(block_bounds(groups)))
    tiles_m, tiles_n = ceil_div(m, config.block_m), ceil_div(n, config.block_n)
    tma = config.tma and a.codes.data_ptr() % 16 == 0 and b.codes.data_ptr() % 16 == 0

    def launch() -> None:
        if tma:
            triton.set_allocator(lambda size, alignment, stream: out.new_empty(size, dtype=torch.int8))
        _wgrad[(groups.num_groups * tiles_m * tiles_n,)](
            a.codes,
            a.scales,
            b.codes,
            b.scales,
            out,
            bounds,
            m,
            n,
            tiles_m,
            tiles_n,
            config.block_m,
            config.block_n,
            tma,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            maxnreg=config.max_registers,
        )

    with torch.cuda.device_of(out):
        copy_context().run(launch)  # triton's allocator is the context's
    return out


def tiles_of(groups: Groups, block_m: int) -> list[int]:
    """For each tile of block_m rows of each expert, in order, 8 integers:

    the expert; of the tile's run: the number of its first tile, how many tiles it has, its first row in the expert;
    of the expert: rows, first row of R, first row and number of rows when padded.
    """
    table: list[int] = []
    num_tiles = 0
    for span in groups.spans(ROW_MULTIPLE):
        tiles = ceil_div(span.size, block_m)
        for first in range(0, tiles, _RUN):
            count = min(_RUN, tiles - first)
            entry = (span.expert, num_tiles, count, first * block_m, span.size, span.start, *span[3:])
            table.extend(entry * count)
            num_tiles += count
    return table


def block_bounds(groups: Groups) -> list[int]:
    """The first block of 128 padded rows of each expert, and the number of blocks."""
    bounds = [0]
    for size in groups.sizes:
        bounds.append(bounds[-1] + ceil_div(size, FP8_BLOCK))
    return bounds


# Not specialized: each divisibility by 16 would be another compilation, and none reads memory by them.
@triton.jit(do_not_specialize=["num_column_tiles", "b_scales_expert", "b_scales_row"])
def _rows(
    a,
    a_scales,
    b,
    b_scales,
    out,
    tiles,
    N,
    K,
    num_column_tiles,
    b_scales_expert,  # strides
    b_scales_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):
    program = tl.program_id(0)
    entry = tiles + program // num_column_tiles * _ENTRY
    expert = tl.load(entry)
    first_tile, num_tiles, first_row = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    size, start = tl.load(entry + 4), tl.load(entry + 5)
    padded_start, padded_size = tl.load(entry + 6), tl.load(entry + 7)
    in_run = program - first_tile * num_column_tiles
    row = first_row + in_run % num_tiles * BLOCK_M
    column = in_run // num_tiles * BLOCK_N

    # Rows and columns outside of the expert are computed from others inside, and not stored.
    row_M = row + tl.arange(0, BLOCK_M)
    column_N = column + tl.arange(0, BLOCK_N)
    element_K = tl.arange(0, 128)
    num_blocks = K // 128
    a_row_M = tl.minimum(row_M, size - 1)
    b_column_N = tl.minimum(column_N, N - 1)
    a_scale_M = a_scales + padded_start.to(tl.int64) * num_blocks + a_row_M
    b_scale = b_scales + expert.to(tl.int64) * b_scales_expert
    if BLOCK_N <= 128:  # one scale for the whole tile
        b_scale += column // 128 * b_scales_row
    else:
        b_scale += b_column_N // 128 * b_scales_row
    if not TMA:
        a_MK = a + (padded_start + a_row_M).to(tl.int64)[:, None] * K + element_K[None, :]
        b_NK = b + (expert.to(tl.int64) * N + b_column_N)[:, None] * K + element_K[None, :]

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(num_blocks):
        sa = tl.load(a_scale_M + block * padded_size)
        sb = tl.load(b_scale + block)
        if TMA:
            x = a.load([padded_start + row, block * 128])
            y = b.load([expert * N + column, block * 128])
        else:
            x = tl.load(a_MK + block * 128)
            y = tl.load(b_NK + block * 128)
        d = tl.dot(x, y.T)
        if BLOCK_N <= 128:
            scale = (sa * sb)[:, None]
        else:
            scale = sa[:, None] * sb[None, :]
        acc = tl.fma(d, scale, acc)

    target = out + (start + row_M).to(tl.int64)[:, None] * N + column_N[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(row_M < size)[:, None] & (column_N < N)[None, :])


@triton.jit(do_not_specialize=["tiles_m", "tiles_n"])
def _wgrad(
    a,
    a_scales,
    b,
    b_scales,
    out,
    bounds,
    M,
    N,
    tiles_m,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):
    program = tl.program_id(0)
    tiles_of_expert = tiles_m * tiles_n
    expert = program // tiles_of_expert
    in_expert = program % tiles_of_expert
    row = in_expert % tiles_m * BLOCK_M
    column = in_expert // tiles_m * BLOCK_N
    row_M = row + tl.arange(0, BLOCK_M)
    column_N = column + tl.arange(0, BLOCK_N)
    a_row_M = tl.minimum(row_M, M - 1)
    b_row_N = tl.minimum(column_N, N - 1)

    first_block = tl.load(bounds + expert).to(tl.int64)
    num_blocks = (tl.load(bounds + expert + 1) - first_block).to(tl.int32)
    depth = num_blocks * 128
    a_expert, b_expert = a + first_block * 128 * M, b + first_block * 128 * N
    if TMA:  # an expert without rows has no matrix: never read
        depth = tl.maximum(depth, 128)
        a_blocks = tl.make_tensor_descriptor(a_expert, [M, depth], [depth, 1], [BLOCK_M, 128])
        b_blocks = tl.make_tensor_descriptor(b_expert, [N, depth], [depth, 1], [BLOCK_N, 128])
    else:
        element_K = tl.arange(0, 128)
        a_MK = a_expert + a_row_M.to(tl.int64)[:, None] * depth + element_K[None, :]
        b_NK = b_expert + b_row_N.to(tl.int64)[:, None] * depth + element_K[None, :]
    a_scale_M = a_scales + first_block * M + a_row_M
    b_scale_N = b_scales + first_block * N + b_row_N

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(num_blocks):
        sa = tl.load(a_scale_M + block * M)
        sb = tl.load(b_scale_N + block * N)
        if TMA:
            x = a_blocks.load([row, block * 128])
            y = b_blocks.load([column, block * 128])
        else:
            x = tl.load(a_MK + block * 128)
            y = tl.load(b_NK + block * 128)
        d = tl.dot(x, y.T)
        acc = tl.fma(d * sa[:, None], sb[None, :], acc)

    target = out + expert.to(tl.int64) * M * N + row_M.to(tl.int64)[:, None] * N + column_N[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(row_M < M)[:, None] & (column_N < N)[None, :])
