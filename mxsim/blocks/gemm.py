"""A block-scaled FP8 GEMM as a tensor core computes it, to the last bit: which bits of a dot product survive.

A dot product runs through four nested loops, and `Accumulator` says what happens in each:

    step    the tensor core adds `products_per_step` products to its accumulator c, which keeps `fraction_bits`
    span    after `promotion_interval` elements of K, the accumulated d leaves the tensor core
    part    acc = acc + d * sa * sb in float32, span after span
    output  `split_k` parts of K are added in float32, and the sum becomes float32 or bfloat16

Every operand is a significand times a power of two, so that products are exact in float64 (often in float32), and so
are their sums, where need be cut into whole numbers and fractions; rounding happens only where it is written.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int8, UInt8

from mxsim.blocks.block_format import FP8_1X128, FP8_128X128
from mxsim.blocks.layout import CHUNK
from mxsim.blocks.tensor import BlockTensor
from mxsim.formats import BF16, E4M3, E5M2, FP32, FloatFormat, Overflow, Rounding, decode_table, encode
from mxsim.formats.inputs import check_subnormals

_BLOCK = FP8_1X128.block_size
_MAX_FRACTION_BITS = 23  # d is a float32
_MAX_EXACT_SPAN = 2**17  # the whole part of so many products stays below 2**49
_MAX_TILE = 128  # rows and columns of the output worked on at a time
_FP32_NAN = np.uint32(0x7FFFFFFF)
_BF16_NAN = np.uint16(0x7FFF)
_ROUND = {Rounding.TOWARD_ZERO: np.trunc, Rounding.TIES_TO_EVEN: np.rint}


class PromotionOrder(Enum):
    """How the float32 sum takes in d, the accumulated dot product of one span, and the scales of its block."""

    A_THEN_B = "fma(round(d * sa), sb, acc)"
    SCALES_FIRST = "fma(d, round(sa * sb), acc)"
    EXACT = "the exact sum of d * sa * sb, rounded to float32 once, at the end of the part"


@dataclass(frozen=True)
class Accumulator:
    """What a tensor core and the code around it keep of a sum.

    products_per_step: products added at once; divides 128.
    fraction_bits: of the accumulator c, 1 to 23; None: nothing is rounded before d becomes a float32 (ties to even).
    term_rounding: of products and c to multiples of 2**(E - fraction_bits), where E is the largest exponent among them
        (`fp8_gemm`); None: they are added exactly.
    sum_rounding: of the sum, to fraction_bits of its own exponent.
    promotion_interval: elements of K in a span, a divisor or a multiple of 128; None: one span. A span of several
        blocks needs the same scales in all of them.
    scale_order: None: as Hopper has it for the format of b, A_THEN_B for 1x128 and SCALES_FIRST for 128x128.

    Roundings are TOWARD_ZERO or TIES_TO_EVEN.

    Raises:
        TypeError, ValueError: for a field of another type or value.
    """

    name: str
    products_per_step: int = 32
    fraction_bits: int | None = 13
    term_rounding: Rounding | None = Rounding.TOWARD_ZERO
    sum_rounding: Rounding = Rounding.TOWARD_ZERO
    promotion_interval: int | None = _BLOCK
    scale_order: PromotionOrder | None = None

    def __post_init__(self) -> None:
        products, bits, interval = self.products_per_step, self.fraction_bits, self.promotion_interval
        if type(products) is not int or products < 1 or _BLOCK % products:
            raise ValueError(f"{self.name}: products_per_step is {products!r}, needed a divisor of {_BLOCK}")
        if bits is not None and (type(bits) is not int or not 1 <= bits <= _MAX_FRACTION_BITS):
            raise ValueError(f"{self.name}: fraction_bits is {bits!r}, needed 1 to {_MAX_FRACTION_BITS} or None")
        if self.term_rounding is not None and self.term_rounding not in _ROUND:
            raise ValueError(
                f"{self.name}: term_rounding is {self.term_rounding!r}, needed TOWARD_ZERO, TIES_TO_EVEN or None"
            )
        if self.sum_rounding not in _ROUND:
            raise ValueError(f"{self.name}: sum_rounding is {self.sum_rounding!r}, needed TOWARD_ZERO or TIES_TO_EVEN")
        if interval is not None and (
            type(interval) is not int or interval < 1 or (_BLOCK % interval and interval % _BLOCK)
        ):
            raise ValueError(
                f"{self.name}: promotion_interval is {interval!r}, needed a divisor or a multiple of {_BLOCK}, or None"
            )
        if interval is not None and interval % products:
            raise ValueError(
                f"{self.name}: promotion_interval is {interval}, needed a multiple of products_per_step, {products}"
            )
        if not (self.scale_order is None or isinstance(self.scale_order, PromotionOrder)):
            raise TypeError(f"{self.name}: scale_order is {self.scale_order!r}, needed a PromotionOrder or None")

    @property
    def adds_exactly(self) -> bool:
        """Whether products enter the sum unrounded."""
        return self.fraction_bits is None or self.term_rounding is None

    def __str__(self) -> str:
        return self.name


HOPPER = Accumulator("Hopper")
# The real number, rounded to float32 once (split_k > 1: each part).
EXACT = Accumulator("exact", fraction_bits=None, term_rounding=None, scale_order=PromotionOrder.EXACT)
# Product after product in float32, as a scalar loop over each block would.
FP32_SEQUENTIAL = Accumulator(
    "FP32 sequential",
    products_per_step=1,
    fraction_bits=_MAX_FRACTION_BITS,
    term_rounding=None,
    sum_rounding=Rounding.TIES_TO_EVEN,
)


def fp8_gemm(
    a: BlockTensor, b: BlockTensor, *, accumulator: Accumulator = HOPPER, split_k: int = 1, out: Any = np.float32
) -> Float[np.ndarray, "m n"]:
    """a @ b.T with the accumulator's arithmetic; HOPPER is what `scaled_mm` of torch returns on an H200.

    1. Step. The products p_i = a_i * b_i of one step are exact. e(x) = floor(log2 |x|), but at least that of the
       smallest normal number: a subnormal operand keeps the exponent -6 in E4M3, -14 in E5M2. E = the largest of
       e(a_i) + e(b_i) over the non-zero products, and of floor(log2 |c|) if c is not 0; q = 2**(E - fraction_bits);
       t = sum of term_rounding(p_i / q) + term_rounding(c / q), exact. The new c is t * q in sum_rounding to
       fraction_bits of its own exponent; zero is +0.
    2. Span. c starts at 0, and is d after promotion_interval elements.
    3. Part. acc = fma(d * sa, sb, acc) or fma(d, sa * sb, acc) from acc = 0, every operation rounded to float32, ties
       to even; subnormals are kept, overflow gives infinity.
    4. Output. split_k contiguous parts of ceil(blocks / split_k) blocks (the last of what is left) are added to +0 in
       order in float32; an unsplit K is not, and keeps a -0. bfloat16 rounds the sum once more, ties to even.

    An infinity of E5M2 in a span makes its d what IEEE sums of the products are: infinite, or NaN where infinity meets
    zero or the opposite infinity. A NaN in a row's codes or scales makes its outputs NaN; that and every NaN that
    float32 arithmetic gives (infinities) is 0x7FFFFFFF, in bfloat16 0x7FFF. A K that is no multiple of 128 acts as if
    padded with zeros.

    Args:
        a: FP8_1X128 [M, K] along the last axis, or such blocks of E5M2: replace(FP8_1X128, element=E5M2).
        b: FP8_1X128 [N, K] along the last axis, or FP8_128X128 [N, K]; or such blocks of E5M2.
        split_k: 1 to the number of 128-blocks.
        out: float32 or ml_dtypes.bfloat16.

    Raises:
        TypeError: if a or b is not a BlockTensor, accumulator no Accumulator, out another dtype.
        RuntimeError: if this thread flushes subnormal numbers to zero.
        ValueError: if formats, axes, the number of axes or K do not fit, split_k is out of range, scales differ within
            a span, or a span has more than 2**17 elements and its terms are added exactly.

    Source: NUMERICS 9, measured; of E5M2, 11. How cuBLAS cuts a K that does not divide into equal parts is not known.

    >>> from mxsim.blocks import quantize
    >>> a = quantize([[256.0] + [2.0**-6] * 31], FP8_1X128)
    >>> fp8_gemm(a, quantize(np.ones((1, 32)), FP8_1X128))  # 256 + 31 * 2**-6, but 2**-6 is below 2**(8 - 13)
    array([[256.]], dtype=float32)
    """
    check_subnormals("fp8_gemm")
    dtype = _check(a, b, accumulator, split_k, out)
    is_tiled = b.format.is_tile
    order = accumulator.scale_order or (PromotionOrder.SCALES_FIRST if is_tiled else PromotionOrder.A_THEN_B)
    rows_a = _Rows(a.codes, a.scales, _elements(a.format.element))
    scales_b = b.scales.repeat(_BLOCK, axis=0)[: b.shape[0]] if is_tiled else b.scales
    rows_b = _Rows(b.codes, scales_b, _elements(b.format.element))
    num_elements = a.shape[1]
    parts = list(_pieces(range(num_elements), -(-rows_a.scales.shape[1] // split_k) * _BLOCK)) or [range(0)]
    for name, rows in (("a", rows_a), ("b", rows_b)):
        _check_spans(name, rows.scales, parts, accumulator)

    result: np.ndarray = np.empty((a.shape[0], b.shape[0]), dtype)
    for m, n in _tiles(a.shape[0], b.shape[0], accumulator, order, rows_a.scales.shape[1]):
        tile_a, tile_b = rows_a.take(m), rows_b.take(n)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            total = _part(tile_a, tile_b, parts[0], accumulator, order)
            if len(parts) > 1:
                total = np.float32(0) + total  # -0 becomes +0
            for part in parts[1:]:
                total = total + _part(tile_a, tile_b, part, accumulator, order)
        is_nan = np.isnan(total) | tile_a.has_nan()[:, None] | tile_b.has_nan()
        result[m, n] = _to_output(total, is_nan, dtype)
    return result


# ----------------------------------------------------------------------------------------------------------- operands
# e(x) of zero: a product with a zero must never be the largest.
_ZERO_EXPONENT = -64


class _Elements(NamedTuple):
    """What a code stands for, by code.

    values: 0 for what is not finite: the outputs that it touches are written over.
    exponents: e(x).
    parts: arrays that add up to values, such that products of a part with a part, and sums of 2**17 of them, are exact.
    limits: infinities, NaN, and the signs of all else, which is all of it that counts beside them.
    """

    values: Float64[np.ndarray, "256"]
    exponents: Int8[np.ndarray, "256"]
    parts: tuple[Float64[np.ndarray, "256"], ...]
    limits: Float64[np.ndarray, "256"]


@cache
def _elements(fmt: FloatFormat) -> _Elements:
    decoded = decode_table(fmt).astype(np.float64)
    values = np.where(np.isfinite(decoded), decoded, 0)
    exponents = np.where(values == 0, _ZERO_EXPONENT, np.maximum(np.frexp(values)[1] - 1, fmt.emin)).astype(np.int8)
    # E5M2 has 34 binary places: above 1 and below, 18 and 16.
    parts = (
        (values,) if fmt == E4M3 else tuple(np.where((abs(values) >= 1) == above, values, 0) for above in (True, False))
    )
    return _Elements(values, exponents, parts, np.where(np.isfinite(decoded), np.sign(decoded), decoded))


class _Rows(NamedTuple):
    """Rows of an operand, with a scale for every row and block."""

    codes: UInt8[np.ndarray, "rows k"]
    scales: Float32[np.ndarray, "rows blocks"]
    elements: _Elements

    def take(self, rows: slice) -> "_Rows":
        return self._replace(codes=self.codes[rows], scales=self.scales[rows])

    def columns(self, piece: range) -> "_Rows":
        """The codes of a piece of K."""
        return self._replace(codes=self.codes[:, piece.start : piece.stop])

    def has_nan(self) -> Bool[np.ndarray, " rows"]:
        is_nan = np.isnan(self.elements.limits)
        found: np.ndarray = is_nan[self.codes].any(axis=1) | np.isnan(self.scales).any(axis=1)
        return found


# --------------------------------------------------------------------------------------------------- from step to part
def _part(
    a: _Rows, b: _Rows, part: range, accumulator: Accumulator, order: PromotionOrder
) -> Float32[np.ndarray, "m n"]:
    """float32 sum of d * sa * sb over the spans of a part (a range of K)."""
    total: np.ndarray = np.zeros((a.codes.shape[0], b.codes.shape[0]), np.float32)
    terms: list[np.ndarray] = []
    for span in _pieces(part, accumulator.promotion_interval):
        scale_a = a.scales[:, span.start // _BLOCK, None].astype(np.float64)
        scale_b = b.scales[None, :, span.start // _BLOCK].astype(np.float64)
        d, rest = _accumulate(a.columns(span), b.columns(span), accumulator)
        if order is PromotionOrder.EXACT:
            terms += _exact_terms(d, scale_a * scale_b)
            if rest.any():
                terms += _exact_terms(rest, scale_a * scale_b)
            continue
        d = _to_float32(_round_to_odd(d, rest))
        if order is PromotionOrder.A_THEN_B:
            total = _fma(_to_float32(d * scale_a), scale_b, total)
        else:
            total = _fma(d, _to_float32(scale_a * scale_b), total)
    return _rounded_sum(terms) if terms else total


def _accumulate(
    a: _Rows, b: _Rows, accumulator: Accumulator
) -> tuple[Float64[np.ndarray, "m n"], Float64[np.ndarray, "m n"]]:
    """d, the accumulator after the steps of a span, from 0: (the nearest float64, the rest of it)."""
    c, rest = (np.zeros((a.codes.shape[0], b.codes.shape[0])) for _ in range(2))
    bits = accumulator.fraction_bits
    for step in _pieces(range(a.codes.shape[1]), _BLOCK if bits is None else accumulator.products_per_step):
        step_a, step_b = a.columns(step), b.columns(step)
        if bits is None or accumulator.term_rounding is None:
            c, rest = _exact_sum(step_a, step_b, c, rest)
        else:
            c = _aligned_sum(step_a, step_b, c, bits, _ROUND[accumulator.term_rounding])
        if bits is not None:
            fraction, exponent = np.frexp(_round_to_odd(c, rest))  # |fraction| in [1/2, 1)
            c = np.ldexp(_ROUND[accumulator.sum_rounding](np.ldexp(fraction, bits + 1)), exponent - bits - 1)
            c += 0.0  # no -0, whatever NumPy makes of a sum of them
            rest = np.zeros_like(c)
    limit = _limit(a, b)
    is_number = np.isfinite(limit)
    return np.where(is_number, c, limit), np.where(is_number, rest, 0)


def _aligned_sum(
    a: _Rows, b: _Rows, c: Float64[np.ndarray, "m n"], fraction_bits: int, round_term: Any
) -> Float64[np.ndarray, "m n"]:
    """sum of round(p_i / q) * q + round(c / q) * q, q = 2**(E - fraction_bits)."""
    codes_a, codes_b = a.codes.T, b.codes.T  # (k, m), (k, n)
    exponents = a.elements.exponents[codes_a][:, :, None] + b.elements.exponents[codes_b][:, None, :]
    exponent = exponents.max(axis=0).astype(np.int32)
    exponent = np.maximum(exponent, np.where(c == 0, _ZERO_EXPONENT, np.frexp(c)[1] - 1))
    # A rounded term is an integer below 2**(fraction_bits + 2); the sum of them all must be exact.
    dtype = np.float32 if fraction_bits + 2 + len(codes_a).bit_length() <= 24 else np.float64
    inverse_q = np.ldexp(dtype(1), fraction_bits - exponent)  # where all terms are 0, any power of two serves
    values_a, values_b = (x.elements.values.astype(dtype) for x in (a, b))
    terms = values_a[codes_a][:, :, None] * values_b[codes_b][:, None, :]  # (k, m, n), exact: 8 bits
    terms *= inverse_q
    round_term(terms, out=terms)
    total: np.ndarray = terms.sum(axis=0).astype(np.float64) + round_term(c * inverse_q)
    scaled: np.ndarray = np.ldexp(total, exponent - fraction_bits)
    return scaled


def _exact_sum(
    a: _Rows, b: _Rows, c: Float64[np.ndarray, "m n"], rest: Float64[np.ndarray, "m n"]
) -> tuple[Float64[np.ndarray, "m n"], Float64[np.ndarray, "m n"]]:
    """a @ b.T + c + rest without rounding, as (the nearest float64, the rest of it).

    Everything is a multiple of 2**-32, and its whole part stays below 2**49.
    """
    terms = [x[a.codes] @ y[b.codes].T for x in a.elements.parts for y in b.elements.parts]  # in any order: exact
    if len(terms) == 1:  # E4M3: multiples of 2**-18 below 2**35
        return terms[0] + c, rest
    whole = fraction = 0.0
    for term in (*terms, c, rest):
        whole_term = np.trunc(term)
        whole, fraction = whole + whole_term, fraction + (term - whole_term)
    return _two_sum(whole, fraction)


def _limit(a: _Rows, b: _Rows) -> Float64[np.ndarray, "m n"]:
    """Sum of the products that IEEE arithmetic gives where an infinity is among them; else any finite number."""
    limits = [x.elements.limits[x.codes] for x in (a, b)]
    total: np.ndarray = np.zeros((a.codes.shape[0], b.codes.shape[0]))
    for k in np.flatnonzero(np.isinf(limits[0]).any(axis=0) | np.isinf(limits[1]).any(axis=0)):
        total += np.multiply.outer(limits[0][:, k], limits[1][:, k])
    return total


# ------------------------------------------------------------------------------------------------- one rounding each
def _to_float32(x: Float64[np.ndarray, "m n"]) -> Float64[np.ndarray, "m n"]:
    """Nearest float32, ties to even, as float64."""
    rounded: np.ndarray = x.astype(np.float32).astype(np.float64)
    return rounded


def _fma(
    x: Float64[np.ndarray, "m n"], y: Float64[np.ndarray, "m n"], z: Float32[np.ndarray, "m n"]
) -> Float32[np.ndarray, "m n"]:
    """x * y + z of float32 numbers, rounded to float32 once."""
    return _round_to_odd(*_two_sum(x * y, z)).astype(np.float32)  # x * y is exact: 48 bits


def _two_sum(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """(x + y in float64, what its rounding lost, exactly). Where it is not finite, so is what was lost."""
    total = x + y
    y_part = total - x
    return total, (x - (total - y_part)) + (y - y_part)


def _round_to_odd(total: Float64[np.ndarray, "*shape"], lost: Float64[np.ndarray, "*shape"]) -> np.ndarray:
    """total + lost rounded to odd, where total is the nearest float64 and |lost| is at most half an ulp of it.

    Rounding that to float32 then gives total + lost rounded once: the odd last bit keeps it off the ties.
    """
    bits = total.view(np.int64)
    moves = (lost != 0) & np.isfinite(lost) & (bits & 1 == 0)
    step = np.where((lost > 0) == (total > 0), 1, -1)
    rounded: np.ndarray = (bits + moves * step).view(np.float64)
    return rounded


def _exact_terms(d: Float64[np.ndarray, "m n"], scale: Float64[np.ndarray, "m n"]) -> list[np.ndarray]:
    """Four float64 numbers whose sum is d * scale: 53 by 48 bits, each cut in two. Infinite and NaN: the first."""
    first, *others = (x * y for x in _halves(d) for y in _halves(scale))
    is_finite = np.isfinite(scale) & np.isfinite(d)
    return [np.where(is_finite, first, d * scale), *(np.where(is_finite, x, 0) for x in others)]


def _halves(x: Float64[np.ndarray, "m n"]) -> tuple[np.ndarray, np.ndarray]:
    """(leading 26 bits of x, the others)."""
    high = np.where(np.isfinite(x), (x.view(np.int64) & -(2**27)).view(np.float64), x)
    return high, np.where(np.isfinite(x), x - high, 0)


def _rounded_sum(terms: Sequence[Float64[np.ndarray, "m n"]]) -> Float32[np.ndarray, "m n"]:
    """The sum of all terms, rounded to float32 once; a zero is +0.

    A compensated sum settles nearly all outputs: both ends of the interval that holds the exact sum round alike. The
    few others (near a tie, cancelled) go through `math.fsum`.
    """
    total, lost, magnitude = (np.zeros(terms[0].shape) for _ in range(3))
    for term in terms:
        new = total + term
        part = new - total
        lost += (total - (new - part)) + (term - part)
        magnitude += abs(term)
        total = new
    total = np.where(np.isfinite(total), total + lost, total)
    error = abs(total) * 2.0**-50 + magnitude * (len(terms) ** 2 * 2.0**-100)
    low, high = ((total + sign * error).astype(np.float32) for sign in (-1, 1))
    result: np.ndarray = np.where(np.isfinite(total), high, total.astype(np.float32))
    for i, j in np.argwhere(np.isfinite(total) & ((low != high) | (high == 0))):
        column = [float(term[i, j]) for term in terms]
        nearest = math.fsum(column)
        lost_here = math.fsum([*column, -nearest])
        result[i, j] = _round_to_odd(np.array([nearest]), np.array([lost_here])).astype(np.float32)[0]
    return result


def _to_output(total: Float32[np.ndarray, "m n"], is_nan: Bool[np.ndarray, "m n"], dtype: np.dtype) -> np.ndarray:
    if dtype == np.float32:
        bits = np.where(is_nan, _FP32_NAN, total.view(np.uint32))
    else:
        finite = np.where(is_nan, np.float32(0), total)
        bits = np.where(is_nan, _BF16_NAN, encode(finite, BF16, overflow=Overflow.TO_NONFINITE))
    return bits.view(dtype)


# ------------------------------------------------------------------------------------------------------------- pieces
def _pieces(whole: range, size: int | None) -> Iterator[range]:
    """Consecutive pieces of a range, each of the given size (None: one piece) but the last."""
    step = size or max(len(whole), 1)
    for start in range(whole.start, whole.stop, step):
        yield range(start, min(start + step, whole.stop))


def _tiles(
    rows: int, columns: int, accumulator: Accumulator, order: PromotionOrder, num_blocks: int
) -> Iterator[tuple[slice, slice]]:
    """Pieces of the output whose temporaries, one value a product of a step, have about CHUNK elements."""
    per_output = max(1 if accumulator.fraction_bits is None else accumulator.products_per_step, 1)
    if order is PromotionOrder.EXACT:
        per_output = max(per_output, 8 * num_blocks)
    column_step = max(1, min(columns, _MAX_TILE, CHUNK // per_output))
    row_step = max(1, CHUNK // per_output // column_step)
    for m in range(0, rows, row_step):
        for n in range(0, columns, column_step):
            yield slice(m, m + row_step), slice(n, n + column_step)


# ---------------------------------------------------------------------------------------------------------- arguments
def _check(a: BlockTensor, b: BlockTensor, accumulator: Accumulator, split_k: int, out: Any) -> np.dtype:
    for name, t, formats in (("a", a, (FP8_1X128,)), ("b", b, (FP8_1X128, FP8_128X128))):
        if not isinstance(t, BlockTensor):
            raise TypeError(f"fp8_gemm: {name} is a {type(t).__name__}, needed a BlockTensor")
        has_elements = t.format.element in (E4M3, E5M2) and t.format.scale == FP32
        if not has_elements or t.format.block_shape not in [f.block_shape for f in formats] or t.axis != -1:
            needed = " or ".join(map(str, formats))
            raise ValueError(
                f"fp8_gemm: {name} is {t.format} along axis {t.axis}, needed {needed} along axis -1, of E4M3 or E5M2"
            )
        if t.ndim != 2:
            raise ValueError(f"fp8_gemm: {name} has {t.ndim} axes, needed 2")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"fp8_gemm: b has rows of {b.shape[1]} elements, needed {a.shape[1]}, as in a")
    if not isinstance(accumulator, Accumulator):
        raise TypeError(f"fp8_gemm: accumulator is {accumulator!r}, needed an Accumulator")
    num_blocks = a.scales.shape[1]
    if (
        isinstance(split_k, bool)
        or not isinstance(split_k, (int, np.integer))
        or not 1 <= split_k <= max(num_blocks, 1)
    ):
        raise ValueError(f"fp8_gemm: split_k is {split_k!r}, needed 1 to {max(num_blocks, 1)}, the blocks of K")
    try:
        dtype: np.dtype = np.dtype(out)
    except TypeError:
        raise TypeError(f"fp8_gemm: out is {out!r}, needed float32 or bfloat16") from None
    if dtype != np.float32 and dtype.name != "bfloat16":
        raise TypeError(f"fp8_gemm: out is {dtype}, needed float32 or bfloat16")
    return dtype


def _check_spans(
    name: str, scales: Float32[np.ndarray, "rows blocks"], parts: list[range], accumulator: Accumulator
) -> None:
    for part in parts:
        for span in _pieces(part, accumulator.promotion_interval):
            blocks = scales[:, span.start // _BLOCK : -(-span.stop // _BLOCK)]
            if not np.array_equal(blocks, np.broadcast_to(blocks[:, :1], blocks.shape), equal_nan=True):
                raise ValueError(
                    f"fp8_gemm: scales of {name} differ within a span of {len(span)} elements, needed equal ones for "
                    f"{accumulator}, whose promotion_interval is {accumulator.promotion_interval}"
                )
            if accumulator.adds_exactly and len(span) > _MAX_EXACT_SPAN:
                raise ValueError(
                    f"fp8_gemm: a span has {len(span)} elements, needed at most {_MAX_EXACT_SPAN} for {accumulator}, "
                    "whose terms are added exactly"
                )
