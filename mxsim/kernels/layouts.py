"""What the kernels return, and how it lies in memory (NUMERICS section 8): results and their allocation."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Float8e4m3fn, Int64, UInt8
from torch import Tensor

FP4_BLOCK = 32
FP8_BLOCK = 128
DEFAULT_ROW_MULTIPLE = 4  # torch's scaled_mm takes row counts that are multiples of 4


class Fp4Rows(NamedTuple):
    """MXFP4 rows: two codes a byte (element 2j in the low nibble), one E8M0 scale code for each 32 elements."""

    codes: UInt8[Tensor, "R K/2"]
    scales: UInt8[Tensor, "R K/32"]


class Fp8Rows(NamedTuple):
    """FP8 rows, a float32 scale for each 128 elements: codes [R, K]; scales [R, K/128] with strides (1, ceil4(R))."""

    codes: Float8e4m3fn[Tensor, "R K"]
    scales: Float[Tensor, "R K/128"]


class RaggedFp8Rows(NamedTuple):
    """FP8 rows expert by expert, each expert's padded to a multiple of row_multiple.

    With p = padded_group_sizes = round_up(group_sizes, row_multiple) and P its running sum, expert e has the rows
    P[e] : P[e] + p[e] of codes; the rows past its own are code 0x00 with scale 1. Its scales are
    scales[P[e] * K/128 : (P[e] + p[e]) * K/128].view(K/128, p[e]).t(), whose strides are (1, p[e]).
    """

    codes: Float8e4m3fn[Tensor, "rows K"]
    scales: Float[Tensor, " rows*K/128"]
    padded_group_sizes: Int64[Tensor, " experts"]


class Fp8Cols(NamedTuple):
    """FP8 columns: the transposed rows, a float32 scale for each column of 128 rows, rows padded with code 0x00.

    Dense: codes [K, ceil128(R)]; scales [ceil(R/128), K]; padded_group_sizes is None.

    Ragged: with p = ceil128(group_sizes) and P its running sum, expert e has codes
    codes[K * P[e] : K * (P[e] + p[e])].view(K, p[e]) and scales[P[e] / 128 : (P[e] + p[e]) / 128].
    """

    codes: Float8e4m3fn[Tensor, "K rows"] | Float8e4m3fn[Tensor, " K*rows"]
    scales: Float[Tensor, "rows/128 K"]
    padded_group_sizes: Int64[Tensor, " experts"] | None = None


class Fp8Tiles(NamedTuple):
    """FP8 matrices with a float32 scale for each tile of 128 x 128; tiles at the far edges may be smaller.

    scales[..., i, j] belongs to codes[..., 128 i : 128 i + 128, 128 j : 128 j + 128]. Its rows lie ceil4(columns / 128)
    apart, which is what torch's scaled_mm reads: see `scaled_mm_scales`. What pads a row of scales is 1.
    """

    codes: Float8e4m3fn[Tensor, "*batch N K"]
    scales: Float[Tensor, "*batch tiles_N tiles_K"]

    def scaled_mm_scales(self) -> Float[Tensor, "ceil4(tiles_K) tiles_N"]:
        """The scales of one matrix [N, K] as `torch.nn.functional.scaled_mm` takes them for its transpose; no copy."""
        tiles_n, tiles_k = self.scales.shape
        return self.scales.as_strided((round_up(tiles_k, 4), tiles_n), (1, round_up(tiles_k, 4)))


def ceil_div(a: int, b: int) -> int:
    """ceil(a / b) of integers."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least a."""
    return -(-a // multiple) * multiple


def max_row_units(num_rows: int, num_groups: int, multiple: int) -> int:
    """Multiples of `multiple` rows that suffice for num_rows rows in groups of any sizes, each padded to whole ones."""
    return ceil_div(num_rows + (multiple - 1) * num_groups, multiple)


def max_column_blocks(num_rows: int, num_groups: int, block: int = FP8_BLOCK) -> int:
    """The same for blocks of 128 rows, to the last block: a group of n rows needs at most (n + 127) / 128."""
    return (num_rows + (block - 1) * num_groups) // block


def empty_fp4_rows(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(codes, scales) of `Fp4Rows` of [R, K] elements."""
    num_rows, num_columns = shape
    return (
        _empty(num_rows, num_columns // 2, torch.uint8, device),
        _empty(num_rows, num_columns // FP4_BLOCK, torch.uint8, device),
    )


def empty_fp8_rows(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(codes, scales) of dense `Fp8Rows` [R, K]."""
    num_rows, num_columns = shape
    codes = _empty(num_rows, num_columns, torch.float8_e4m3fn, device)
    num_blocks, stride = num_columns // FP8_BLOCK, round_up(num_rows, 4)
    scales = torch.empty_strided((stride, num_blocks), (1, stride), dtype=torch.float32, device=device)
    return codes, scales if stride == num_rows else scales.narrow(0, 0, num_rows)


def empty_ragged_fp8_rows(padded_rows: int, num_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(codes, scales) of `RaggedFp8Rows`, padded_rows in all."""
    return (
        _empty(padded_rows, num_columns, torch.float8_e4m3fn, device),
        torch.empty_strided((padded_rows * (num_columns // FP8_BLOCK),), (1,), dtype=torch.float32, device=device),
    )


def empty_fp8_cols(num_blocks: int, num_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(codes, scales) of dense `Fp8Cols`; num_blocks = ceil(R / 128)."""
    return (
        _empty(num_columns, num_blocks * FP8_BLOCK, torch.float8_e4m3fn, device),
        _empty(num_blocks, num_columns, torch.float32, device),
    )


def empty_ragged_fp8_cols(num_blocks: int, num_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(codes, scales) of ragged `Fp8Cols`; num_blocks = the sum of ceil(m_e / 128)."""
    size = num_columns * num_blocks * FP8_BLOCK
    return (
        torch.empty_strided((size,), (1,), dtype=torch.float8_e4m3fn, device=device),
        _empty(num_blocks, num_columns, torch.float32, device),
    )


def empty_fp8_tiles(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(codes, scales) of `Fp8Tiles` [..., N, K]."""
    *batch, rows, columns = shape
    codes = torch.empty(tuple(shape), dtype=torch.float8_e4m3fn, device=device)
    tile_rows, tile_columns = ceil_div(rows, FP8_BLOCK), ceil_div(columns, FP8_BLOCK)
    buffer = (*batch, tile_rows, round_up(tile_columns, 4))
    if buffer[-1] == tile_columns:
        return codes, torch.empty(buffer, dtype=torch.float32, device=device)
    return codes, torch.ones(buffer, dtype=torch.float32, device=device).narrow(-1, 0, tile_columns)


def _empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A contiguous matrix; torch.empty takes a microsecond more to say the same.
    return torch.empty_strided((rows, columns), (columns, 1), dtype=dtype, device=device)
