"""From rows to columns: what each way of transposing a quantized activation costs the weight gradient X^T dY.

Wgrad sums over tokens, so it wants X in blocks of 128 tokens of one channel, where it was stored in blocks of one
token. A block of tokens has one scale, and tokens differ in scale: that spread is what the ways are tested with.

Every way starts from codes: MXFP4 or FP8 rows, made from BF16 by the only rounding that all share, or from BF16 itself.
Two errors are told apart: that of the conversion, against the values of the codes that it started from, and the total
one, against BF16.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from jaxtyping import Float, Float64

from mxsim.analysis.published_transpose import published_fp8_transpose
from mxsim.blocks import (
    FP8_1X128,
    MXFP4,
    BlockTensor,
    ScaleOrder,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_gemm,
    fp8_row_to_fp8_col,
    quantize,
)
from mxsim.formats import BF16, philox_bits, round_to
from mxsim.formats.inputs import as_float, as_numpy

_BLOCK = FP8_1X128.block_size
_SIGNIFICANT_DIGITS = 6  # of the errors: what is left does not depend on the order in which float64 sums are taken


class RowToColumn(Enum):
    """From what, and how. An amax is that of a column's 128 tokens; FP32 scales are 448 / amax as TransformerEngine's.

    VIA_FP8_ROWS: MXFP4 rows -> FP8 rows, as the forward pass has them -> columns.
    """

    FP4_DIRECT = "MXFP4, direct, headroom 6"
    FP4_DIRECT_H0 = "MXFP4, direct, headroom 0"
    FP4_FRESH_AMAX = "MXFP4, BF16, new amax"
    FP4_FRESH_AMAX_FP32 = "MXFP4, BF16, new amax, FP32 scales"
    FP4_VIA_FP8_ROWS = "MXFP4, FP8 rows, rounding transpose"
    FP4_VIA_FP8_ROWS_PUBLISHED = "MXFP4, FP8 rows, published transpose"
    FP8_TRANSPOSE = "FP8, rounding transpose"
    FP8_PUBLISHED = "FP8, published transpose"
    FP8_FRESH_AMAX = "FP8, BF16, new amax"
    FP8_FRESH_AMAX_FP32 = "FP8, BF16, new amax, FP32 scales"
    BF16_FRESH_AMAX = "BF16, new amax"


@dataclass(frozen=True)
class RowToColumnRow:
    """One way on one activation X [m, K].

    sigma_octaves: standard deviation over tokens of log2 of their scale: the one drawn from, or the one measured.
    max_spread: largest minus smallest MXFP4 scale exponent in 128 tokens of a block of 32 channels, in octaves.
    inexact: share of the elements whose value is not the one that the codes had.
    conversion_error, total_error: relative Frobenius error of the columns against the codes' values, and against BF16.
    worst_token_error: largest relative Frobenius error of one token's row against its codes' values, tokens of zeros
        left out.
    wgrad_conversion_error, wgrad_total_error: as above, of X^T dY in float64; dY is exact, so that only X counts.
    wgrad_balanced_error: as wgrad_conversion_error, dY scaled so that every token counts as much as any other: its
        scale is the inverse of the token's in X, as a power of two.
    wgrad_fp8_error: of `fp8_gemm` of the columns and dY in FP8, by Hopper's accumulator, against X^T dY of BF16;
        None where it was not asked for.
    """

    data: str
    way: RowToColumn
    sigma_octaves: float
    max_spread: int
    inexact: float
    conversion_error: float
    total_error: float
    worst_token_error: float
    wgrad_conversion_error: float
    wgrad_balanced_error: float
    wgrad_total_error: float
    wgrad_fp8_error: float | None


# ---------------------------------------------------------------------------------------------------------- the ways
def columns_by(way: RowToColumn, x: Float[np.ndarray, "m k"]) -> tuple[Float64[np.ndarray, "m k"], BlockTensor]:
    """(values of the codes that the way starts from, columns FP8_1X128 [K, ceil128(m)]) for the activation x.

    x is rounded to BF16 first. MXFP4 by its default rule, FLOOR; FP8 scales are powers of two where not said otherwise.

    Raises:
        TypeError: if way is no RowToColumn, or x holds no floating-point numbers.
        ValueError: if x is no matrix, is empty, or holds NaN or infinity.
    """
    if not isinstance(way, RowToColumn):
        raise TypeError(f"columns_by: way is {way!r}, needed a RowToColumn")
    bf16 = round_to(_checked_matrix(x, "columns_by", "x"), BF16).astype(np.float64)
    if way is RowToColumn.BF16_FRESH_AMAX:
        return bf16, _fresh_columns(bf16)
    from_fp4 = way.name.startswith("FP4")
    source = quantize(bf16, MXFP4 if from_fp4 else FP8_1X128)
    return source.dequantize(np.float64), _CONVERSIONS[way](source)


def _fresh_columns(values: Float64[np.ndarray, "m k"], order: ScaleOrder | None = None) -> BlockTensor:
    """To BF16 (which rounds no code's value), transposed, padded with zeros, quantized by each column block's amax."""
    num_rows = values.shape[0]
    padded = np.zeros((values.shape[1], -(-num_rows // _BLOCK) * _BLOCK))
    padded[:, :num_rows] = round_to(values, BF16).T
    t = quantize(padded, FP8_1X128, scale_order=order)
    return BlockTensor(t.codes, t.scales, FP8_1X128, source_rows=num_rows)


def _through_bf16(order: ScaleOrder | None) -> Callable[[BlockTensor], BlockTensor]:
    return lambda t: _fresh_columns(t.dequantize(np.float64), order)


_CONVERSIONS: dict[RowToColumn, Callable[[BlockTensor], Any]] = {
    RowToColumn.FP4_DIRECT: fp4_row_to_fp8_col,
    RowToColumn.FP4_DIRECT_H0: lambda t: fp4_row_to_fp8_col(t, headroom=0),
    RowToColumn.FP4_FRESH_AMAX: _through_bf16(None),
    RowToColumn.FP4_FRESH_AMAX_FP32: _through_bf16(ScaleOrder.TE),
    RowToColumn.FP4_VIA_FP8_ROWS: lambda t: fp8_row_to_fp8_col(fp4_row_to_fp8_row(t)),
    RowToColumn.FP4_VIA_FP8_ROWS_PUBLISHED: lambda t: published_fp8_transpose(fp4_row_to_fp8_row(t)),
    RowToColumn.FP8_TRANSPOSE: fp8_row_to_fp8_col,
    RowToColumn.FP8_PUBLISHED: published_fp8_transpose,
    RowToColumn.FP8_FRESH_AMAX: _through_bf16(None),
    RowToColumn.FP8_FRESH_AMAX_FP32: _through_bf16(ScaleOrder.TE),
}


# --------------------------------------------------------------------------------------------------------- measuring
def study_rows_to_columns(
    data: str,
    x: Float[np.ndarray, "m k"],
    dy: Float[np.ndarray, "m n"],
    *,
    ways: Sequence[RowToColumn] = tuple(RowToColumn),
    sigma_octaves: float | None = None,
    with_fp8_gemm: bool = False,
) -> Iterator[RowToColumnRow]:
    """A row for each way.

    Args:
        dy: the gradient of the output, one row a token.
        sigma_octaves: the spread that x was drawn with; None: measured, from the tokens' root mean squares.
        with_fp8_gemm: also multiply in FP8. The emulation takes a second for 10**8 products.

    Raises:
        TypeError, ValueError: as `columns_by`; if dy does not have x's number of rows, is zero or not finite; if x is
            all zeros.
    """
    caller = "study_rows_to_columns"
    x, dy = _checked_matrix(x, caller, "x"), _checked_matrix(dy, caller, "dy")
    if dy.shape[0] != x.shape[0]:
        raise ValueError(f"{caller}: dy has {dy.shape[0]} rows, needed {x.shape[0]}, the tokens of x")
    x = round_to(x, BF16).astype(np.float64)
    for name, array in (("x", x), ("dy", dy)):
        if not array.any():
            raise ValueError(f"{caller}: {name} holds only zeros, so that no error is relative to anything")
    token_exponent = _rms_exponents(x)
    if sigma_octaves is None:
        sigma_octaves = measured_sigma_octaves(x)
    balanced_dy = np.ldexp(dy, -token_exponent[:, None])
    dy_columns = _fresh_columns(dy) if with_fp8_gemm else None
    wgrad_of_bf16 = _wgrad(x, dy)
    max_spread = column_spread(quantize(x, MXFP4))
    for way in ways:
        source, columns = columns_by(way, x)
        result = columns.dequantize(np.float64)[:, : x.shape[0]].T
        nonzero = source.any(axis=1)
        token_error = np.linalg.norm(result - source, axis=1)[nonzero] / np.linalg.norm(source, axis=1)[nonzero]
        gemm = None if dy_columns is None else fp8_gemm(columns, dy_columns).astype(np.float64)
        yield RowToColumnRow(
            data=data,
            way=way,
            sigma_octaves=_rounded(sigma_octaves),
            max_spread=max_spread,
            inexact=_rounded(np.count_nonzero(result != source) / x.size),
            conversion_error=_relative_error(result, source),
            total_error=_relative_error(result, x),
            worst_token_error=_rounded(token_error.max()),
            wgrad_conversion_error=_relative_error(_wgrad(result, dy), _wgrad(source, dy)),
            wgrad_balanced_error=_relative_error(_wgrad(result, balanced_dy), _wgrad(source, balanced_dy)),
            wgrad_total_error=_relative_error(_wgrad(result, dy), wgrad_of_bf16),
            wgrad_fp8_error=None if gemm is None else _relative_error(gemm, wgrad_of_bf16),
        )


def column_spread(t: BlockTensor) -> int:
    """Largest minus smallest scale exponent of MXFP4 rows [m, K] over 128 rows of a block of 32 columns.

    Blocks that hold only zeros are left out.

    Raises:
        TypeError: if t is not a BlockTensor.
        ValueError: if t is not MXFP4 along the last axis of a matrix, or all of it is zeros or NaN.
    """
    if not isinstance(t, BlockTensor):
        raise TypeError(f"column_spread: t is a {type(t).__name__}, needed a BlockTensor")
    if t.format != MXFP4 or t.axis != -1 or t.ndim != 2:
        raise ValueError(f"column_spread: t is {t.format} of {t.ndim} axes, needed MXFP4 along the last of two")
    exponents = t.scales.astype(np.int64)
    starts = np.arange(0, t.shape[1], MXFP4.block_size)
    used = (np.maximum.reduceat(t.codes & 7, starts, axis=1) > 0) & (t.scales != 0xFF)
    if not used.any():
        raise ValueError("column_spread: t holds only zeros and NaN")
    starts = np.arange(0, t.shape[0], _BLOCK)
    highest = np.maximum.reduceat(np.where(used, exponents, -1), starts)
    lowest = np.minimum.reduceat(np.where(used, exponents, 256), starts)
    return max(int((highest - lowest).max()), 0)


def measured_sigma_octaves(x: Float[np.ndarray, "m k"]) -> float:
    """Standard deviation over the rows of log2 of their root mean square; rows of zeros are left out.

    Raises:
        TypeError, ValueError: as `columns_by`.
    """
    x = _checked_matrix(x, "measured_sigma_octaves", "x")
    x = x[x.any(axis=1)]
    if not x.size:
        return 0.0
    largest = np.abs(x).max(axis=1, keepdims=True)  # taken out: no square overflows or vanishes
    log2_rms = np.log2(largest[:, 0]) + np.log2(np.square(x / largest).mean(axis=1)) / 2
    return float(np.std(log2_rms))


def lognormal_rows(shape: tuple[int, int], sigma_octaves: float, *, seed: int = 0) -> Float64[np.ndarray, "m k"]:
    """N(0,1) elements, each row times 2**(sigma_octaves * z), z ~ N(0,1): tokens of log-normal scale, in BF16.

    Every sigma_octaves has the same elements and the same z.

    Raises:
        ValueError: if sigma_octaves is not between 0 and 20.
    """
    if not 0 <= sigma_octaves <= 20:
        raise ValueError(f"lognormal_rows: sigma_octaves is {sigma_octaves}, needed 0 to 20")
    elements, z = _normal(shape, seed), _normal((shape[0], 1), seed + 1)
    return round_to(elements * np.exp2(sigma_octaves * z), BF16).astype(np.float64)


def normal_gradient(shape: tuple[int, int], *, seed: int = 100) -> Float64[np.ndarray, "m n"]:
    """dY: N(0,1) in BF16."""
    return round_to(_normal(shape, seed), BF16).astype(np.float64)


def _normal(shape: tuple[int, int], seed: int) -> Float64[np.ndarray, "rows columns"]:
    """N(0,1) by Box and Muller, of Philox's bits: the same on every machine."""
    u = (philox_bits(seed, (2, *shape)) + 0.5) * 2.0**-32
    normal: np.ndarray = np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * u[1])
    return normal


# ---------------------------------------------------------------------------------------------------- where it breaks
@dataclass(frozen=True)
class Break:
    """The smallest sigma_octaves of a sweep at which a way rounds any element, and at which an error exceeds a level.

    None: at none of the sweep's.
    """

    way: RowToColumn
    first_inexact: float | None
    first_above_level: float | None


def breaks(rows: Iterable[RowToColumnRow], *, level: float = 0.01, error: str = "worst_token_error") -> list[Break]:
    """One `Break` a way, of the rows of one sweep, in the order in which ways appear.

    Args:
        level: of the relative error.
        error: which one, a field of RowToColumnRow.

    Raises:
        ValueError: if rows is empty, error is no error of a row, or level is not positive.
    """
    rows = list(rows)
    names = [name for name in RowToColumnRow.__dataclass_fields__ if name.endswith("_error")]
    if not rows:
        raise ValueError("breaks: rows is empty, needed a sweep")
    if error not in names:
        raise ValueError(f"breaks: error is {error!r}, needed one of {', '.join(names)}")
    if not level > 0:
        raise ValueError(f"breaks: level is {level}, needed one above 0")
    found = []
    for way in dict.fromkeys(row.way for row in rows):
        of_way = sorted((row for row in rows if row.way is way), key=lambda row: row.sigma_octaves)
        inexact = (row.sigma_octaves for row in of_way if row.inexact > 0)
        above = (row.sigma_octaves for row in of_way if (getattr(row, error) or 0) > level)
        found.append(Break(way, next(inexact, None), next(above, None)))
    return found


# ------------------------------------------------------------------------------------------------------------ pieces
def _wgrad(x: Float64[np.ndarray, "m k"], dy: Float64[np.ndarray, "m n"]) -> Float64[np.ndarray, "k n"]:
    """x.T @ dy, in float64; without BLAS, which orders its sums as it likes."""
    product: np.ndarray = np.einsum("mk,mn->kn", x, dy)
    return product


def _relative_error(result: Float64[np.ndarray, "*shape"], reference: Float64[np.ndarray, "*shape"]) -> float:
    return _rounded(math.sqrt(np.square(result - reference).sum() / np.square(reference).sum()))


def _rounded(x: float) -> float:
    return float(f"{x:.{_SIGNIFICANT_DIGITS}g}")


def _rms_exponents(x: Float64[np.ndarray, "m k"]) -> np.ndarray:
    """Exponent of each row's root mean square; 0 for a row of zeros."""
    exponents: np.ndarray = np.frexp(np.sqrt(np.square(x).mean(axis=1)))[1]
    return exponents


def _checked_matrix(x: Any, caller: str, name: str) -> Float64[np.ndarray, "rows columns"]:
    array = as_numpy(x, caller=caller, name=name)
    if array.dtype.kind in "iub":
        raise TypeError(f"{caller}: {name} has the dtype {array.dtype}, needed floating-point numbers")
    array = as_float(array, caller=caller, name=name).astype(np.float64)
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"{caller}: {name} has the shape {array.shape}, needed a matrix of at least one element")
    num_bad = np.count_nonzero(~np.isfinite(array))
    if num_bad:
        raise ValueError(f"{caller}: {name} holds {num_bad} NaNs or infinities, needed finite numbers")
    return array
