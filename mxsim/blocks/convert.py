"""The direct conversions between MXFP4 and FP8 blocks, in integers: no float and no BF16 in between (NUMERICS 4 to 6).

A block's scale exponent moves into the elements' exponents; `mxsim.formats.rescale` re-rounds the codes once.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int, UInt8

from mxsim.blocks.block_format import FP8_1X128, MXFP4, BlockFormat
from mxsim.blocks.layout import CHUNK
from mxsim.blocks.scale_rule import MIN_SCALE_EXPONENT, ScaleRule, scale_exponent_of_parts
from mxsim.blocks.tensor import BlockTensor
from mxsim.formats import E2M1, E4M3, FloatFormat
from mxsim.formats.rescale import rescale

_NAN_SCALE_CODE = 0xFF  # E8M0
_NAN_CODE = 0x7F  # E4M3
_FP4_BLOCK = MXFP4.block_size
_FP8_BLOCK = FP8_1X128.block_size
_FP32_NAN = np.float32(np.nan)


def fp4_row_to_fp8_row(t: BlockTensor, *, headroom: int = 6) -> BlockTensor:
    """Four MXFP4 blocks of 32 -> one FP8 block of 128: scale 2**(E - headroom), E = the largest of the four exponents.

    Element: E4M3(v * 2**(headroom - d)), d = E - E_i, one rounding, ties to even, sign kept. Exact for every code where
    d <= 8 + headroom; without E4M3 subnormals where d <= 5 + headroom. headroom stops at 6: 6 * 2**6 = 384 <= 448.

    A NaN scale is left out of E (all four NaN: E = -127) and gives 0x7F for its own 32 elements. A last group with
    fewer than four blocks uses those it has.

    Args:
        t: MXFP4 along the last axis, any shape.

    Raises:
        TypeError: if t is not a BlockTensor.
        ValueError: if t is not MXFP4 along its last axis, or headroom is outside 0..6.

    Source: NUMERICS 4; the paper's FP4RowToFP8Row is headroom = 0.

    >>> from mxsim.blocks import quantize
    >>> fp8 = fp4_row_to_fp8_row(quantize([[6.0] * 32 + [0.5] * 32], MXFP4))
    >>> [hex(c) for c in fp8.codes[0, [0, 32]]], fp8.scales
    (['0x7c', '0x60'], array([[0.015625]], dtype=float32))
    """
    _check_source(t, MXFP4, "fp4_row_to_fp8_row")
    _check_headroom(headroom, "fp4_row_to_fp8_row")
    exponents, is_nan = _e8m0_exponents(t.scales)
    shared = _max_of_groups(np.where(is_nan, MIN_SCALE_EXPONENT, exponents), _FP8_BLOCK // _FP4_BLOCK)
    num_blocks = exponents.shape[-1]
    spread = np.repeat(shared, _FP8_BLOCK // _FP4_BLOCK, axis=-1)[..., :num_blocks] - exponents
    codes = _rescale_rows(t.codes, E2M1, E4M3, headroom - spread, is_nan, _FP4_BLOCK)
    return BlockTensor(codes, _float32_power_of_two(shared - headroom), FP8_1X128)


def fp8_row_to_fp4_row(t: BlockTensor, *, scale_rule: ScaleRule | None = None) -> BlockTensor:
    """One FP8 block of 128 -> four MXFP4 blocks of 32, straight from the E4M3 significands.

    Scale exponent X of each 32: `scale_rule` (None: FLOOR) of the largest magnitude code, plus the block's exponent,
    clamped to [-127, 127]. Element: E2M1(v * 2**(s8 - X)), one rounding, ties to even, saturating, sign kept. That is
    what `quantize` gives for the exact dequantized values.

    NaN in a 32-block: scale 0xFF, codes 0. A NaN scale: so for its four blocks. An all-zero block: scale code 0.

    Round trip: fp8_row_to_fp4_row(fp4_row_to_fp8_row(x)) under FLOOR has the values of x for every block that was
    converted exactly. The scale may be renormalised: a block whose largest element is below 4 gets a smaller
    scale and larger codes, down to X = -127.

    Args:
        t: FP8_1X128 along the last axis, its scales powers of two or NaN.

    Raises:
        TypeError: if t is not a BlockTensor, or scale_rule no ScaleRule.
        ValueError: if t is not FP8_1X128 along its last axis, or a scale is neither a power of two nor NaN.

    Source: NUMERICS 6.
    """
    _check_source(t, FP8_1X128, "fp8_row_to_fp4_row")
    if not (scale_rule is None or isinstance(scale_rule, ScaleRule)):
        raise TypeError(f"fp8_row_to_fp4_row: scale_rule is {scale_rule!r}, needed a ScaleRule or None")
    rule = scale_rule or ScaleRule.FLOOR
    exponents, is_nan = _float32_exponents(t.scales, "fp8_row_to_fp4_row")
    columns = t.shape[-1]
    num_blocks = -(-columns // _FP4_BLOCK)
    source_exponents = np.repeat(exponents, _FP8_BLOCK // _FP4_BLOCK, axis=-1)[..., :num_blocks]
    amax_code = _max_of_groups(t.codes & E4M3.magnitude_mask, _FP4_BLOCK).astype(np.intp)
    poisoned = (amax_code == _NAN_CODE) | np.repeat(is_nan, _FP8_BLOCK // _FP4_BLOCK, axis=-1)[..., :num_blocks]

    amax_exponent, amax_fraction = _E4M3_EXPONENT[amax_code], _E4M3_FRACTION[amax_code]
    x = scale_exponent_of_parts(amax_exponent + source_exponents, amax_fraction, E4M3.mantissa_bits, E2M1, rule)
    x = np.where(amax_code == 0, MIN_SCALE_EXPONENT, x)
    codes = _rescale_rows(t.codes, E4M3, E2M1, source_exponents - x, poisoned, _FP4_BLOCK, nan_code=0)
    scales = np.where(poisoned, _NAN_SCALE_CODE, x - MIN_SCALE_EXPONENT).astype(np.uint8)
    return BlockTensor(codes, scales, MXFP4)


def fp4_row_to_fp8_col(
    t: BlockTensor, *, headroom: int = 6, group_sizes: Sequence[int] | np.ndarray | None = None
) -> Any:
    """MXFP4 rows [m, K] -> FP8 columns [K, ceil128(m)]: dequantize, transpose and requantize with at most one rounding.

    As `fp4_row_to_fp8_row`, but a block is 128 rows of one column: E = the largest exponent over those rows of the
    blocks that hold (row, k), the same for the 32 columns of a group. Exact for every code where
    E - E_i <= 8 + headroom.

    The last block may have fewer than 128 real rows: E is taken over those; the padding is code 0x00.

    Args:
        t: MXFP4 along the last axis; leading axes are flattened into rows.
        group_sizes: rows of each expert, in order; blocks never cross experts. None: one group.

    Returns:
        FP8_1X128 of shape [K, ceil128(m)] with source_rows = m; with group_sizes a list of them, one an expert.

    Raises:
        TypeError: if t is not a BlockTensor, or group_sizes are not integers.
        ValueError: if t is not MXFP4 along its last axis, headroom is outside 0..6, or group_sizes are negative or do
            not sum to the rows.

    Source: NUMERICS 5; the paper's FP4RowToFP8Col ("msplit" with group_sizes).
    """
    caller = "fp4_row_to_fp8_col"
    _check_source(t, MXFP4, caller)
    _check_headroom(headroom, caller)
    exponents, is_nan = _e8m0_exponents(t.scales)
    rows = _Rows(t, exponents, is_nan, ignored=is_nan)
    return _columns(
        rows, _FP4_BLOCK, headroom, empty_exponent=MIN_SCALE_EXPONENT, group_sizes=group_sizes, caller=caller
    )


def fp8_row_to_fp8_col(t: BlockTensor, *, group_sizes: Sequence[int] | np.ndarray | None = None) -> Any:
    """FP8 rows [m, K] -> FP8 columns [K, ceil128(m)]: the scaling-aware transpose.

    Element: E4M3(v * 2**(E_i - E)), E = the largest scale exponent over the 128 rows; one rounding, ties to even, NaN
    stays NaN, sign kept, source subnormals not flushed. Row blocks whose 128 codes are all zeros, and NaN scales, are
    left out of E (none left: scale 1), so that one masked token cannot flush a whole column block. A NaN scale gives
    0x7F for its elements. Padding, arguments, results and errors as in `fp4_row_to_fp8_col`; a scale that is neither a
    power of two nor NaN is a ValueError.

    Source: NUMERICS 5.4. Departs from the published transpose (arXiv 2511.02302), which does not round.
    """
    caller = "fp8_row_to_fp8_col"
    _check_source(t, FP8_1X128, caller)
    exponents, is_nan = _float32_exponents(t.scales, caller)
    is_zero = _max_of_groups(t.codes & E4M3.magnitude_mask, _FP8_BLOCK) == 0
    rows = _Rows(t, exponents, is_nan, ignored=is_nan | is_zero)
    return _columns(rows, _FP8_BLOCK, 0, empty_exponent=0, group_sizes=group_sizes, caller=caller)


def count_inexact(source: BlockTensor, result: BlockTensor | Sequence[BlockTensor]) -> int:
    """How many elements of source have another value in the result of a conversion; NaN equals NaN, +0 equals -0.

    Args:
        result: of any conversion of source: rows, columns (padding left out), or a list of columns, one a group.

    Raises:
        TypeError: if source is not a BlockTensor, or result neither one nor a list of them.
        ValueError: if the shapes are not those of a conversion of source.
    """
    if not isinstance(source, BlockTensor):
        raise TypeError(f"count_inexact: source is a {type(source).__name__}, needed a BlockTensor")
    if not isinstance(result, BlockTensor) and not (
        isinstance(result, (list, tuple)) and all(isinstance(t, BlockTensor) for t in result)
    ):
        raise TypeError(f"count_inexact: result is a {type(result).__name__}, needed a BlockTensor or a list of them")
    if isinstance(result, BlockTensor) and result.source_rows is None:
        if result.shape != source.shape:
            raise ValueError(f"count_inexact: result has shape {result.shape}, needed {source.shape}, that of source")
        return _count_different(source.dequantize(np.float64), result.dequantize(np.float64))
    columns = [result] if isinstance(result, BlockTensor) else list(result)
    values = source.dequantize(np.float64).reshape(prod(source.shape[:-1]), source.shape[-1])
    rows = [0 if c.source_rows is None else c.source_rows for c in columns]
    if sum(rows) != values.shape[0] or any(c.shape[0] != values.shape[1] for c in columns):
        raise ValueError(
            f"count_inexact: result holds {sum(rows)} source rows in shapes {[c.shape for c in columns]}, needed "
            f"{values.shape[0]} rows of {values.shape[1]}"
        )
    starts = np.cumsum([0, *rows])
    return sum(
        _count_different(values[start : start + n], c.dequantize(np.float64)[:, :n].T)
        for start, n, c in zip(starts, rows, columns, strict=False)
    )


# ------------------------------------------------------------------------------------------------------------ columns
class _Rows:
    """A source as matrices: codes [m, K]; and of each block its exponent, if it is NaN, if E leaves it out."""

    def __init__(self, t: BlockTensor, exponents: np.ndarray, is_nan: np.ndarray, ignored: np.ndarray) -> None:
        num_rows = prod(t.shape[:-1])
        self.codes, self.exponents, self.is_nan, self.ignored = (
            a.reshape(num_rows, a.shape[-1]) for a in (t.codes, exponents, is_nan, ignored)
        )
        self.element = t.format.element


def _columns(
    rows: _Rows,
    block: int,
    headroom: int,
    *,
    empty_exponent: int,
    group_sizes: Sequence[int] | np.ndarray | None,
    caller: str,
) -> Any:
    num_rows = rows.codes.shape[0]
    sizes = [num_rows] if group_sizes is None else _checked_group_sizes(group_sizes, num_rows, caller)
    starts = np.cumsum([0, *sizes])
    results = [
        _one_group(rows, slice(s, s + n), block, headroom, empty_exponent) for s, n in zip(starts, sizes, strict=False)
    ]
    return results[0] if group_sizes is None else results


def _one_group(rows: _Rows, group: slice, block: int, headroom: int, empty_exponent: int) -> BlockTensor:
    codes, exponents = rows.codes[group], rows.exponents[group]
    num_rows, num_columns = codes.shape
    lowest = np.iinfo(np.int32).min
    shared = _max_of_groups(
        np.where(rows.ignored[group], lowest, exponents).T, _FP8_BLOCK, fill=lowest
    )  # (blocks, m/128)
    shared = np.where(shared == lowest, empty_exponent, shared)
    spread = np.repeat(shared.T, _FP8_BLOCK, axis=0)[:num_rows] - exponents
    converted = _rescale_rows(codes, rows.element, E4M3, headroom - spread, rows.is_nan[group], block)
    columns = np.zeros((num_columns, shared.shape[1] * _FP8_BLOCK), np.uint8)
    columns[:, :num_rows] = converted.T
    scales = np.repeat(_float32_power_of_two(shared - headroom), block, axis=0)[:num_columns]
    return BlockTensor(columns, scales, FP8_1X128, source_rows=num_rows)


# ------------------------------------------------------------------------------------------------------------- pieces
def _rescale_rows(
    codes: UInt8[np.ndarray, "*batch columns"],
    source: FloatFormat,
    target: FloatFormat,
    shift: Int[np.ndarray, "*batch blocks"],
    poisoned: Bool[np.ndarray, "*batch blocks"],
    block: int,
    *,
    nan_code: int = _NAN_CODE,
) -> UInt8[np.ndarray, "*batch columns"]:
    """Codes times 2**shift of their block, nan_code in poisoned blocks; some rows at a time."""
    out: np.ndarray = np.empty(codes.shape, np.uint8)
    columns, num_blocks = codes.shape[-1], shift.shape[-1]
    if not codes.size:
        return out
    rows_out, rows_in = out.reshape(-1, columns), codes.reshape(-1, columns)
    shift, poisoned = shift.reshape(-1, num_blocks), poisoned.reshape(-1, num_blocks)
    step = max(1, CHUNK // columns)
    for start in range(0, rows_in.shape[0], step):
        piece = slice(start, start + step)
        by_element = np.repeat(shift[piece], block, axis=-1)[:, :columns]
        rows_out[piece] = rescale(rows_in[piece], source, target, by_element)
        if poisoned[piece].any():
            rows_out[piece][np.repeat(poisoned[piece], block, axis=-1)[:, :columns]] = nan_code
    return out


def _max_of_groups(values: np.ndarray, size: int, fill: int | None = None) -> np.ndarray:
    """Maximum of each `size` neighbours along the last axis; a short last group uses what it has."""
    *batch, n = values.shape
    num_groups = -(-n // size)
    lowest = np.iinfo(values.dtype).min if fill is None else fill
    padded = np.full((*batch, num_groups * size), lowest, values.dtype)
    padded[..., :n] = values
    maximum: np.ndarray = padded.reshape(*batch, num_groups, size).max(axis=-1)
    return maximum


def _e8m0_exponents(scales: UInt8[np.ndarray, "*blocks"]) -> tuple[np.ndarray, np.ndarray]:
    """(exponent, is NaN) of E8M0 codes."""
    return scales.astype(np.int32) + MIN_SCALE_EXPONENT, scales == _NAN_SCALE_CODE


def _float32_exponents(scales: Float32[np.ndarray, "*blocks"], caller: str) -> tuple[np.ndarray, np.ndarray]:
    """(exponent, is NaN) of float32 powers of two, subnormals included; a NaN's exponent is 0."""
    bits = np.ascontiguousarray(scales).view(np.uint32).astype(np.int64)
    biased_exponent, fraction = bits >> 23, bits & 0x7FFFFF
    is_nan = ((biased_exponent & 0xFF) == 0xFF) & (fraction != 0)
    normal = (biased_exponent >= 1) & (biased_exponent <= 254) & (fraction == 0)
    subnormal = (biased_exponent == 0) & (fraction != 0) & (fraction & (fraction - 1) == 0)
    refused = ~(is_nan | normal | subnormal)
    if refused.any():
        index = tuple(int(i) for i in np.argwhere(refused)[0])
        raise ValueError(f"{caller}: scale {scales[index]} at index {index} is neither a positive power of two nor NaN")
    exponents = np.where(normal, biased_exponent - 127, 0)
    for bit in range(23):
        exponents = np.where(subnormal & (fraction == 1 << bit), bit - 149, exponents)
    return exponents.astype(np.int32), is_nan


def _float32_power_of_two(exponent: Int[np.ndarray, "*blocks"]) -> Float32[np.ndarray, "*blocks"]:
    """2**exponent for -149 <= exponent <= 127, from its bits."""
    bits = np.where(exponent >= -126, (exponent + 127) << 23, 1 << np.maximum(exponent + 149, 0))
    return bits.astype(np.uint32).view(np.float32)


def _normalized_e4m3() -> tuple[np.ndarray, np.ndarray]:
    """(exponent, fraction of 3 bits) of each E4M3 magnitude code with its leading one made implicit; 0 for code 0."""
    codes = np.arange(E4M3.magnitude_mask + 1)
    biased_exponent, fraction = codes >> 3, codes & 7
    shift = np.array([4 - int(f).bit_length() if b == 0 else 0 for b, f in zip(biased_exponent, fraction, strict=True)])
    return np.maximum(biased_exponent, 1) - E4M3._bias - shift, (fraction << shift) & 7


_E4M3_EXPONENT, _E4M3_FRACTION = _normalized_e4m3()


def _count_different(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.count_nonzero((a != b) & ~(np.isnan(a) & np.isnan(b))))


# ---------------------------------------------------------------------------------------------------------- arguments
def _check_source(t: BlockTensor, fmt: BlockFormat, caller: str) -> None:
    if not isinstance(t, BlockTensor):
        raise TypeError(f"{caller}: t is a {type(t).__name__}, needed a BlockTensor")
    if t.format != fmt or t.axis != -1:
        raise ValueError(f"{caller}: t is {t.format} along axis {t.axis}, needed {fmt} along axis -1")


def _check_headroom(headroom: int, caller: str) -> None:
    if isinstance(headroom, bool) or not isinstance(headroom, (int, np.integer)) or not 0 <= headroom <= 6:
        raise ValueError(f"{caller}: headroom is {headroom!r}, needed an integer 0 to 6")


def _checked_group_sizes(group_sizes: Sequence[int] | np.ndarray, num_rows: int, caller: str) -> list[int]:
    sizes = np.asarray(group_sizes)
    if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu"):
        raise TypeError(f"{caller}: group_sizes is {sizes.dtype} of shape {sizes.shape}, needed a list of integers")
    if (sizes < 0).any():
        raise ValueError(f"{caller}: group_sizes holds {sizes.min()}, needed sizes of 0 or more")
    rows = [int(n) for n in sizes]
    if sum(rows) != num_rows:
        raise ValueError(f"{caller}: group_sizes sum to {sum(rows)}, needed {num_rows}, the rows of t")
    return rows
