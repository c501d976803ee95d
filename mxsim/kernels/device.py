"""Loading and launching the CUDA kernels: the backend of `mxsim.kernels.ops` for CUDA tensors.

Each function launches one kernel on the current stream of the tensors' device and waits for nothing. Arguments are
checked and allocated by `ops`; inputs are contiguous, except the scales of FP8 rows, which are read by their strides.
"""

import ctypes
import struct
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mxsim.kernels import build
from mxsim.kernels.arguments import GemmOperands

_PARAMS = struct.Struct("<8Q7q4iq")  # struct Params in include/mxsim/params.h
_THREADS = 256  # of every kernel
_TILE_COLS = 512  # kTileCols
_TILE_ROWS = 32  # kWarpRows * kTileWarps
_RAGGED_FP4_TILE_ROWS = 64
_FP8_TO_FP4_TILE_COLS = 1024
_BLOCK_ROWS = 128  # kBlockRows
_MAX_GRID_Y = 32768
_GEMM_PARAMS = struct.Struct("<5Q7q9i4x")  # struct GemmParams in src/gemm_emulated.cu
_GEMM_TILE = 64  # kTile
_MAX_FLOAT_FRACTION_BITS = 16  # 33 integers below 2**(16 + 2) sum exactly in float
_Grid = tuple[int, int, int]
_FLAT_ELEMENTS = {torch.bfloat16: 8192, torch.float16: 2048, torch.float32: 2048}  # a block of to_fp4_row
_TILE_COLUMNS = {"fp4_row_to_fp8_col": 256, "fp8_row_to_fp8_col": 128, "bf16_to_fp8_col": 64}  # Op::kCols
# Row blocks that a column kernel works on side by side. Measured: dense, the more the better (0.78 of a copy at 16,
# 0.84 at 256); ragged, where the stride changes from expert to expert, few (0.80 at 4 to 16; 0.68 at 256).
_BAND_BLOCKS, _RAGGED_BAND_BLOCKS = 1024, 8
_FP4_ROW_KERNELS = {
    torch.bfloat16: "bf16_to_fp4_row",
    torch.float16: "f16_to_fp4_row",
    torch.float32: "f32_to_fp4_row",
}
_CUDA_ERROR_INVALID_CONTEXT = 201


def to_fp4_row(x: Tensor, codes: Tensor, scales: Tensor, rule: int, seed: int | None = None) -> None:
    """MXFP4 rows of bfloat16, float16 or float32. A seed: stochastic rounding."""
    kernel = _FP4_ROW_KERNELS[x.dtype]
    if seed is not None:
        grid = (-(-x.numel() // (8 * _THREADS)), 1, 1)
        _launch("stochastic_rows", f"stochastic_{kernel}", grid, x, out=(codes, scales), rule=rule, seed=seed)
        return
    grid = (-(-x.numel() // _FLAT_ELEMENTS[x.dtype]), 1, 1)
    _launch("to_fp4_row", kernel, grid, x, out=(codes, scales), rule=rule)


def fp8_row_to_fp4_row(codes: Tensor, scales: Tensor, out_codes: Tensor, out_scales: Tensor, rule: int) -> None:
    """MXFP4 rows of FP8 rows."""
    grid = _tile_grid(*codes.shape, _TILE_ROWS, _FP8_TO_FP4_TILE_COLS)
    _launch("fp8_rows", "fp8_row_to_fp4_row", grid, codes, scales, out=(out_codes, out_scales), rule=rule)


def fp4_row_to_fp8_row(
    codes: Tensor,
    scales: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    headroom: int,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
    row_multiple: int,
) -> None:
    """FP8 rows of MXFP4 rows, dense or ragged."""
    _launch(
        "fp4_rows",
        "fp4_row_to_fp8_row_dense" if group_sizes is None else "fp4_row_to_fp8_row_ragged",
        _tile_grid(*out_codes.shape, _TILE_ROWS if group_sizes is None else _RAGGED_FP4_TILE_ROWS),
        codes,
        scales,
        shape=(codes.shape[0], out_codes.shape[1]),
        out=(out_codes, out_scales),
        groups=(group_sizes, padded_sizes, row_multiple),
        headroom=headroom,
    )


def fp4_row_to_fp8_col(
    codes: Tensor,
    scales: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    headroom: int,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
) -> None:
    """FP8 columns of MXFP4 rows, dense or ragged."""
    shape = (codes.shape[0], 2 * codes.shape[1])
    _launch_columns(
        "fp4_row_to_fp8_col", codes, scales, shape, out_codes, out_scales, group_sizes, padded_sizes, headroom
    )


def fp8_row_to_fp8_col(
    codes: Tensor,
    scales: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
) -> None:
    """FP8 columns of FP8 rows, dense or ragged."""
    shape = (codes.shape[0], codes.shape[1])
    _launch_columns("fp8_row_to_fp8_col", codes, scales, shape, out_codes, out_scales, group_sizes, padded_sizes)


def to_fp8_col(
    x: Tensor, out_codes: Tensor, out_scales: Tensor, group_sizes: Tensor | None, padded_sizes: Tensor | None
) -> None:
    """FP8 columns of bfloat16, dense or ragged."""
    shape = (x.shape[0], x.shape[1])
    _launch_columns("bf16_to_fp8_col", x, None, shape, out_codes, out_scales, group_sizes, padded_sizes)


def fp8_row_to_ragged(
    codes: Tensor,
    scales: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    group_sizes: Tensor,
    padded_sizes: Tensor | None,
    row_multiple: int,
) -> None:
    """FP8 rows laid out expert by expert."""
    _launch(
        "fp8_rows",
        "fp8_row_to_ragged",
        _tile_grid(*out_codes.shape),
        codes,
        scales,
        out=(out_codes, out_scales),
        groups=(group_sizes, padded_sizes, row_multiple),
    )


def to_fp8_row(
    x: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
    row_multiple: int,
    seed: int | None = None,
) -> None:
    """FP8 rows of bfloat16, dense or ragged. A seed: stochastic rounding."""
    _launch(
        *_bf16_rows_kernel("bf16_to_fp8_row", group_sizes, seed),
        _tile_grid(*out_codes.shape),
        x,
        out=(out_codes, out_scales),
        groups=(group_sizes, padded_sizes, row_multiple),
        seed=seed or 0,
    )


def to_fp4_and_fp8_row(
    x: Tensor,
    fp4_codes: Tensor,
    fp4_scales: Tensor,
    fp8_codes: Tensor,
    fp8_scales: Tensor,
    rule: int,
    headroom: int,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
    row_multiple: int,
    seed: int | None = None,
) -> None:
    """MXFP4 rows of bfloat16 and the FP8 rows converted from them, the latter dense or ragged. A seed: stochastic."""
    _launch(
        *_bf16_rows_kernel("bf16_to_fp4_and_fp8_row", group_sizes, seed),
        _tile_grid(*fp8_codes.shape),
        x,
        out=(fp4_codes, fp4_scales),
        out_fp8=(fp8_codes, fp8_scales),
        groups=(group_sizes, padded_sizes, row_multiple),
        rule=rule,
        headroom=headroom,
        seed=seed or 0,
    )


def _bf16_rows_kernel(name: str, group_sizes: Tensor | None, seed: int | None) -> tuple[str, str]:
    """(source, kernel)."""
    kernel = name + ("_dense" if group_sizes is None else "_ragged")
    return ("bf16_rows", kernel) if seed is None else ("stochastic_rows", f"stochastic_{kernel}")


def to_fp8_tile(w: Tensor, out_codes: Tensor, out_scales: Tensor, transpose: bool) -> None:
    """FP8 tiles of bfloat16 matrices [batch, N, K]; codes and scales are the transpose's with `transpose`."""
    batch, rows, columns = w.shape
    grid = (batch * -(-rows // _BLOCK_ROWS) * -(-columns // _BLOCK_ROWS), 1, 1)
    kernel = "bf16_to_fp8_tile_transposed" if transpose else "bf16_to_fp8_tile_plain"
    by_input_tile = out_scales.transpose(1, 2) if transpose else out_scales
    _launch("bf16_tiles", kernel, grid, w, shape=(rows, columns), out=(out_codes, by_input_tile))


def fp4_to_bf16(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """bfloat16 of MXFP4 rows."""
    grid = (-(-out.numel() // (8 * _THREADS)), 1, 1)
    _launch("fp4_rows", "fp4_to_bf16", grid, codes, scales, shape=out.shape, out=(out, None))


def fp8_gemm_emulated(
    operands: GemmOperands,
    out: Tensor,
    fraction_bits: int,
    products_per_step: int,
    rounding: int,
    promotion_interval: int,
    scale_order: int,
    split_k: int,
) -> None:
    """out = a @ b.T by an accumulator of these numbers (rounding: 0 toward zero, 1 ties to even; interval 0: never)."""
    a, b = (x.clone() if x.data_ptr() % 16 else x for x in (operands.a, operands.b))  # the widest load
    (m, k), n, index = a.shape, b.shape[0], a.get_device()
    arguments = _thread_gemm_arguments
    _GEMM_PARAMS.pack_into(
        arguments.buffer,
        0,
        a.data_ptr(),
        b.data_ptr(),
        operands.a_scales.data_ptr(),
        operands.b_scales.data_ptr(),
        out.data_ptr(),
        m,
        n,
        k,
        *operands.a_scales.stride(),
        *operands.b_scales.stride(),
        operands.rows_per_scale,
        operands.a_is_e5m2,
        operands.b_is_e5m2,
        out.dtype is torch.bfloat16,
        fraction_bits,
        products_per_step,
        promotion_interval,
        scale_order,
        split_k,
    )
    name = "gemm_emulated" if fraction_bits <= _MAX_FLOAT_FRACTION_BITS else "gemm_emulated_wide"
    handle = _kernel("gemm_emulated", f"{name}_{'to_even' if rounding else 'toward_zero'}", index)
    grid = (-(-n // _GEMM_TILE), -(-m // _GEMM_TILE), 1)
    if 0 in grid:
        return
    with torch.cuda.device(index):
        _enqueue(handle, grid, index, arguments)


# ------------------------------------------------------------------------------------------------------------ launches
def _launch_columns(
    name: str,
    codes: Tensor,
    scales: Tensor | None,
    shape: tuple[int, int],
    out_codes: Tensor,
    out_scales: Tensor,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
    headroom: int = 0,
) -> None:
    kernel = name + ("_dense" if group_sizes is None else "_ragged")
    num_blocks = out_scales.shape[0]
    band = min(num_blocks, _BAND_BLOCKS if group_sizes is None else _RAGGED_BAND_BLOCKS)
    grid = (band, -(-shape[1] // _TILE_COLUMNS[name]), -(-num_blocks // band) if band else 0)
    groups = (group_sizes, padded_sizes, _BLOCK_ROWS)
    _launch(
        "fp8_cols",
        kernel,
        grid,
        codes,
        scales,
        shape=shape,
        out=(out_codes, out_scales),
        groups=groups,
        headroom=headroom,
    )


def _tile_grid(rows: int, columns: int, tile_rows: int = _TILE_ROWS, tile_columns: int = _TILE_COLS) -> _Grid:
    tiles = -(-rows // tile_rows)
    y = min(tiles, _MAX_GRID_Y)
    return -(-columns // tile_columns), y, -(-tiles // y) if y else 0


def _launch(
    source: str,
    kernel: str,
    grid: _Grid,
    codes: Tensor,
    scales: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor | None],
    shape: Any = None,
    out_fp8: tuple[Tensor | None, Tensor | None] = (None, None),
    groups: tuple[Tensor | None, Tensor | None, int] = (None, None, 1),
    rule: int = 0,
    headroom: int = 0,
    seed: int = 0,
) -> None:
    group_sizes, padded_sizes, row_multiple = groups
    if 0 in grid:
        if padded_sizes is not None:
            padded_sizes.zero_()
        return
    in_pointer, index = codes.data_ptr(), codes.get_device()
    if in_pointer % 16:  # the widest load
        codes = codes.clone()
        in_pointer = codes.data_ptr()
    scales_pointer, scales_strides = 0, (0, 0)
    if scales is not None:
        scales = scales if scales.data_ptr() % 4 == 0 else scales.clone()
        scales_pointer, scales_strides = scales.data_ptr(), scales.stride()
    out_pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (*out, *out_fp8)]
    # A dense matrix of scales goes by its strides, [batch,] rows, columns; a ragged one is flat and needs none.
    main_scales = out_fp8[1] if out_fp8[1] is not None else out[1]
    batch = row = column = 0
    if main_scales is not None and main_scales.dim() > 1:
        *leading, row, column = main_scales.stride()
        batch = leading[0] if leading else 0
    rows, columns = codes.shape if shape is None else shape
    arguments = _thread_arguments
    _PARAMS.pack_into(
        arguments.buffer,
        0,
        in_pointer,
        scales_pointer,
        *out_pointers,
        0 if group_sizes is None else group_sizes.data_ptr(),
        0 if padded_sizes is None else padded_sizes.data_ptr(),
        rows,
        columns,
        *scales_strides,
        row,
        column,
        batch,
        0 if group_sizes is None else group_sizes.shape[0],
        row_multiple,
        rule,
        headroom,
        seed,
    )
    handle = _kernel(source, kernel, index)
    if torch.cuda.current_device() == index:
        _enqueue(handle, grid, index, arguments)
    else:
        with torch.cuda.device(index):
            _enqueue(handle, grid, index, arguments)


class _Arguments(threading.local):
    """A thread's parameter block and the array of pointers that a launch takes; the launch copies both."""

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(size)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.address = ctypes.addressof(self.pointers)


_thread_arguments = _Arguments(_PARAMS.size)
_thread_gemm_arguments = _Arguments(_GEMM_PARAMS.size)


def _enqueue(handle: int, grid: _Grid, index: int, arguments: _Arguments) -> None:
    launch = _driver().cuLaunchKernel
    stream = torch._C._cuda_getCurrentRawStream(index)
    (status,) = launch(handle, *grid, _THREADS, 1, 1, 0, stream, arguments.address, 0)
    if status == _CUDA_ERROR_INVALID_CONTEXT:  # a thread that torch has not touched yet
        torch.cuda.set_device(index)
        torch.cuda.current_stream(index).query()
        (status,) = launch(handle, *grid, _THREADS, 1, 1, 0, stream, arguments.address, 0)
    if status != 0:
        raise RuntimeError(f"mxsim.kernels: launching on cuda:{index} failed with {status!r}")


# ------------------------------------------------------------------------------------------------------------- loading
@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@cache
def _kernel(source: str, kernel: str, index: int) -> int:
    """Handle of a kernel; one library serves all devices of an architecture."""
    return int(_library(source, architecture(index)).get_kernel(kernel).handle)


@cache
def _library(source: str, arch: str) -> Any:
    from cuda.core import ObjectCode

    return ObjectCode.from_cubin(build.compile_cuda(source, arch), name=source)


def architecture(index: int) -> str:
    """Compiler target of a device: sm_90a on Hopper, the plain architecture elsewhere."""
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        raise RuntimeError(f"mxsim.kernels: cuda:{index} has compute capability {major}.{minor}, needed 8.0 or more")
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"
