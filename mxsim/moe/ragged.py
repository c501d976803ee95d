"""One expert's part of ragged FP8 operands, as views: codes [rows, K] with scales [rows, K/128], and where they lie."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float8e4m3fn
from torch import Tensor

from mxsim.kernels.layouts import (
    DEFAULT_ROW_MULTIPLE,
    FP8_BLOCK,
    Fp8Cols,
    Fp8Tiles,
    RaggedFp8Rows,
    ceil_div,
    max_column_blocks,
    max_row_units,
    round_up,
)
from mxsim.moe.groups import Groups, Span

ROW_MULTIPLE = DEFAULT_ROW_MULTIPLE
_FP8_CODES = (torch.float8_e4m3fn, torch.uint8)


class Operand(NamedTuple):
    """An FP8 matrix with a scale for each 128 elements of a row; strides of the scales: (1, rows)."""

    codes: Float8e4m3fn[Tensor, "rows K"]
    scales: Float[Tensor, "rows K/128"]

    def rows(self, count: int) -> "Operand":
        """The first rows."""
        return Operand(self.codes[:count], self.scales[:count])


def rows_of_expert(a: RaggedFp8Rows, span: Span) -> Operand:
    """The rows of an expert with those that pad it; span: of `spans(ROW_MULTIPLE)`."""
    first, count = span.padded_start, span.padded_size
    num_blocks = a.codes.shape[1] // FP8_BLOCK
    offset = a.scales.storage_offset() + first * num_blocks
    return Operand(a.codes.narrow(0, first, count), a.scales.as_strided((count, num_blocks), (1, count), offset))


def cols_of_expert(a: Fp8Cols, span: Span) -> Operand:
    """The columns of an expert as rows, [M, ceil128(size)]; span: of `spans(128)`."""
    first, count = span.padded_start, span.padded_size
    num_columns = a.scales.shape[1]
    return Operand(
        a.codes.narrow(0, num_columns * first, num_columns * count).view(num_columns, count),
        a.scales.narrow(0, first // FP8_BLOCK, count // FP8_BLOCK).t(),
    )


# -------------------------------------------------------------------------------------------------------------- checks
def check_rows(op: str, a: RaggedFp8Rows, groups: Groups) -> RaggedFp8Rows:
    """a with E4M3 codes, contiguous. Raises unless it is laid out for the groups by the default row multiple."""
    codes = _check_codes(op, "a.codes", a.codes, 2)
    num_rows, depth = codes.shape
    _check_depth(op, "a.codes", depth)
    exact = groups.padded_rows(ROW_MULTIPLE)
    enough = max_row_units(groups.num_rows, groups.num_groups, ROW_MULTIPLE) * ROW_MULTIPLE
    if num_rows not in (exact, enough):
        raise ValueError(
            f"{op}: a.codes has {num_rows} rows, needed {exact} (or {enough}): groups of {groups.num_rows} rows, each "
            f"padded to a multiple of {ROW_MULTIPLE}"
        )
    _check_scales(op, "a.scales", a.scales, (num_rows * (depth // FP8_BLOCK),), codes)
    return RaggedFp8Rows(codes, a.scales.contiguous(), a.padded_group_sizes)


def check_cols(op: str, name: str, a: Fp8Cols, groups: Groups) -> Fp8Cols:
    """a with E4M3 codes, contiguous. Raises unless it is laid out for the groups."""
    codes = _check_codes(op, f"{name}.codes", a.codes, 1)
    if a.scales.dim() != 2:
        raise ValueError(f"{op}: {name}.scales has {a.scales.dim()} axes, needed 2")
    num_blocks, num_columns = a.scales.shape
    exact = groups.padded_rows(FP8_BLOCK) // FP8_BLOCK
    enough = max_column_blocks(groups.num_rows, groups.num_groups)
    if num_blocks not in (exact, enough):
        raise ValueError(
            f"{op}: {name}.scales has {num_blocks} blocks of rows, needed {exact} (or {enough}) for groups of "
            f"{groups.num_rows} rows"
        )
    _check_scales(op, f"{name}.scales", a.scales, (num_blocks, num_columns), codes)
    if len(codes) != num_blocks * FP8_BLOCK * num_columns:
        raise ValueError(
            f"{op}: {name}.codes has {len(codes)} elements, needed {num_blocks * FP8_BLOCK * num_columns} for scales "
            f"of shape {(num_blocks, num_columns)}"
        )
    return Fp8Cols(codes, a.scales.contiguous(), a.padded_group_sizes)


def check_tiles(op: str, b: Fp8Tiles, num_groups: int, depth: int) -> Fp8Tiles:
    """b with E4M3 codes, contiguous, and scales that begin at 16 bytes and whose rows lie ceil4(K/128) apart.

    Copied only where they are not.
    """
    codes = _check_codes(op, "b.codes", b.codes, 3)
    if codes.shape[0] != num_groups:
        raise ValueError(f"{op}: b.codes has {codes.shape[0]} matrices, needed {num_groups}, one for each group")
    if codes.shape[2] != depth:
        raise ValueError(f"{op}: b.codes has rows of {codes.shape[2]} elements, needed {depth}, as in a")
    tiles_n, tiles_k = ceil_div(codes.shape[1], FP8_BLOCK), depth // FP8_BLOCK
    _check_scales(op, "b.scales", b.scales, (num_groups, tiles_n, tiles_k), codes)
    row = round_up(tiles_k, 4)
    scales = b.scales
    if scales.numel() and (scales.stride() != (tiles_n * row, row, 1) or scales.data_ptr() % 16):
        scales = scales.new_ones((num_groups, tiles_n, row)).narrow(2, 0, tiles_k).copy_(scales)
    return Fp8Tiles(codes, scales)


def check_device(op: str, name: str, x: Tensor, a: Tensor) -> None:
    """Raises ValueError unless x is where a is."""
    if x.device != a.device:
        raise ValueError(f"{op}: {name} is on {x.device}, needed {a.device}, where a is")


def _check_codes(op: str, name: str, codes: Tensor, num_axes: int) -> Tensor:
    if codes.dtype not in _FP8_CODES:
        raise TypeError(f"{op}: {name} has dtype {codes.dtype}, needed float8_e4m3fn or uint8")
    if codes.dim() != num_axes:
        raise ValueError(f"{op}: {name} has {codes.dim()} axes, needed {num_axes}")
    return codes.view(torch.uint8).contiguous().view(torch.float8_e4m3fn)


def _check_depth(op: str, name: str, depth: int) -> None:
    if depth % FP8_BLOCK:
        raise ValueError(f"{op}: the last axis of {name} has {depth} elements, which is not a multiple of {FP8_BLOCK}")


def _check_scales(op: str, name: str, scales: Tensor, shape: tuple[int, ...], codes: Tensor) -> None:
    if scales.dtype is not torch.float32:
        raise TypeError(f"{op}: {name} has dtype {scales.dtype}, needed float32")
    if tuple(scales.shape) != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(scales.shape)}, needed {shape}")
    if scales.device != codes.device:
        raise ValueError(f"{op}: {name} is on {scales.device}, needed {codes.device}, where the codes are")
