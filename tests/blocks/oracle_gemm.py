"""The block-scaled FP8 GEMM of NUMERICS 9 in exact rationals: slow, plain, and independent of the package.

Operands are lists of E4M3 or E5M2 codes, scales are binary32 bit patterns, results are binary32 (or bfloat16) bit
patterns. Arithmetic is on `fractions.Fraction`; a float32 is a `Real`, which adds infinities, NaN and the sign of zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import NamedTuple

NAN_BITS, BF16_NAN_BITS = 0x7FFFFFFF, 0x7FFF
BLOCK = 128


@dataclass(frozen=True)
class Rule:
    """One row of what can be asked for; `order` is A_THEN_B, SCALES_FIRST or EXACT."""

    step: int = 32
    fraction_bits: int | None = 13
    term: str | None = "TOWARD_ZERO"
    total: str = "TOWARD_ZERO"
    interval: int | None = BLOCK
    order: str = "A_THEN_B"


HOPPER_ROWS = Rule()
HOPPER_TILES = replace(HOPPER_ROWS, order="SCALES_FIRST")


# --------------------------------------------------------------------------------------------------------- rationals
def floor_log2(x: Fraction) -> int:
    """floor(log2 x), x > 0."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def round_to_multiple(x: Fraction, quantum: Fraction, rounding: str | None) -> Fraction:
    """The multiple of quantum that the rounding picks; None: x itself."""
    if rounding is None:
        return x
    below, rest = divmod(abs(x) / quantum, 1)
    if rounding == "TIES_TO_EVEN" and (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2)):
        below += 1
    return (-below if x < 0 else below) * quantum


class Element(NamedTuple):
    """exponent bits, mantissa bits, bias, and the smallest magnitude code that is no finite number."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    first_special: int


E4M3 = Element(4, 3, 7, 0x7F)
E5M2 = Element(5, 2, 15, 0x7C)
ELEMENTS = {"E4M3": E4M3, "E5M2": E5M2}


def is_nan(code: int, fmt: Element) -> bool:
    return code & 0x7F >= (0x7D if fmt is E5M2 else 0x7F)


@cache
def value_of(code: int, fmt: Element) -> Fraction:
    """Value of a code; what is not finite is for the caller to see."""
    sign = -1 if code & 0x80 else 1
    exponent, fraction = code >> fmt.mantissa_bits & (1 << fmt.exponent_bits) - 1, code & (1 << fmt.mantissa_bits) - 1
    implicit = 1 << fmt.mantissa_bits if exponent else 0
    return sign * (implicit + fraction) * Fraction(2) ** (max(exponent, 1) - fmt.bias - fmt.mantissa_bits)


def exponent_of(code: int, fmt: Element) -> int:
    """e(x) of NUMERICS 9."""
    return max(floor_log2(abs(value_of(code, fmt))), 1 - fmt.bias)


# ------------------------------------------------------------------------------------------------------- tensor core
def step(
    a: Sequence[int], b: Sequence[int], c: Fraction, rule: Rule, formats: tuple[Element, Element] = (E4M3, E4M3)
) -> Fraction:
    """The accumulator after one instruction."""
    of_a, of_b = formats
    products = [value_of(x, of_a) * value_of(y, of_b) for x, y in zip(a, b, strict=True)]
    if rule.fraction_bits is None:
        return sum(products, c)
    exponents = [exponent_of(x, of_a) + exponent_of(y, of_b) for x, y, p in zip(a, b, products, strict=True) if p]
    if c != 0:
        exponents.append(floor_log2(abs(c)))
    if not exponents:
        return Fraction(0)
    quantum = Fraction(2) ** (max(exponents) - rule.fraction_bits)
    total = sum((round_to_multiple(x, quantum, rule.term) for x in [*products, c]), Fraction(0))
    if total == 0:
        return Fraction(0)
    return round_to_multiple(total, Fraction(2) ** (floor_log2(abs(total)) - rule.fraction_bits), rule.total)


def accumulate(
    a: Sequence[int], b: Sequence[int], rule: Rule, formats: tuple[Element, Element] = (E4M3, E4M3)
) -> Fraction:
    """d of one span of finite numbers."""
    c = Fraction(0)
    for start in range(0, len(a), rule.step):
        c = step(a[start : start + rule.step], b[start : start + rule.step], c, rule, formats)
    return c


# ----------------------------------------------------------------------------------------------------------- float32
class Real(NamedTuple):
    """A float32 number: kind is 'finite', 'infinite' or 'nan'; negative tells the zeros and the infinities apart."""

    kind: str
    negative: bool = False
    value: Fraction = Fraction(0)


def exactly(value: Fraction) -> Real:
    return Real("finite", value < 0, value)


NAN = Real("nan")


def unpack32(bits: int) -> Real:
    negative, exponent, fraction = bool(bits >> 31), bits >> 23 & 255, bits & 0x7FFFFF
    if exponent == 255:
        return NAN if fraction else Real("infinite", negative)
    value = Fraction(fraction + (0x800000 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 150)
    return Real("finite", negative, -value if negative else value)


def round32(x: Real) -> Real:
    """Nearest float32, ties to even."""
    if x.kind != "finite" or x.value == 0:
        return x
    quantum = Fraction(2) ** max(floor_log2(abs(x.value)) - 23, -149)
    value = round_to_multiple(x.value, quantum, "TIES_TO_EVEN")
    if abs(value) >= Fraction(2) ** 128:
        return Real("infinite", x.negative)
    return Real("finite", x.negative, value)


def multiply(x: Real, y: Real) -> Real:
    """Exact product, with IEEE's rules for what is not a number."""
    if "nan" in (x.kind, y.kind):
        return NAN
    negative = x.negative != y.negative
    if "infinite" in (x.kind, y.kind):
        is_zero = any(z.kind == "finite" and z.value == 0 for z in (x, y))
        return NAN if is_zero else Real("infinite", negative)
    return Real("finite", negative, x.value * y.value)


def add(x: Real, y: Real) -> Real:
    """Exact sum; two zeros of unlike sign, and a cancelled sum, are +0."""
    if "nan" in (x.kind, y.kind):
        return NAN
    infinite = [z for z in (x, y) if z.kind == "infinite"]
    if infinite:
        return NAN if len({z.negative for z in infinite}) > 1 else infinite[0]
    value = x.value + y.value
    negative = value < 0 or (value == 0 and x.negative and y.negative)
    return Real("finite", negative, value)


def pack32(x: Real) -> int:
    """Bits of what `round32` returned."""
    if x.kind == "nan":
        return NAN_BITS
    sign = int(x.negative) << 31
    if x.kind == "infinite":
        return sign | 0x7F800000
    magnitude = abs(x.value)
    if magnitude < Fraction(2) ** -126:
        return sign | int(magnitude * Fraction(2) ** 149)
    exponent = floor_log2(magnitude)
    return sign | (exponent + 127 << 23) + int(magnitude * Fraction(2) ** (23 - exponent)) - 0x800000


def to_bf16(bits: int) -> int:
    """bfloat16 bits of float32 bits, ties to even."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return BF16_NAN_BITS
    below, rest = divmod(bits, 1 << 16)
    return below + (rest > 0x8000 or (rest == 0x8000 and below % 2))


# -------------------------------------------------------------------------------------------------------- dot product
def dot(
    a: Sequence[int],
    b: Sequence[int],
    scales_a: Sequence[int],
    scales_b: Sequence[int],
    rule: Rule = HOPPER_ROWS,
    split_k: int = 1,
    formats: tuple[Element, Element] = (E4M3, E4M3),
) -> int:
    """Bits of one output: codes of a row of each operand, and the bits of the scales of their blocks."""
    if any(is_nan(code, fmt) for codes, fmt in zip((a, b), formats, strict=True) for code in codes):
        return NAN_BITS
    scales = [(unpack32(x), unpack32(y)) for x, y in zip(scales_a, scales_b, strict=True)]
    if any("nan" in (x.kind, y.kind) for x, y in scales):
        return NAN_BITS
    part_length = -(-len(scales) // split_k) * BLOCK
    total = exactly(Fraction(0))
    for start in range(0, len(a), part_length or 1):
        part = _part(a, b, scales, range(start, min(start + part_length, len(a))), rule, formats)
        total = part if part_length >= len(a) else round32(add(total, part))  # parts are added to +0
    return pack32(total)


def _part(
    a: Sequence[int],
    b: Sequence[int],
    scales: Sequence[tuple[Real, Real]],
    elements: range,
    rule: Rule,
    formats: tuple[Element, Element],
) -> Real:
    total = exactly(Fraction(0))
    interval = rule.interval or len(elements)
    for start in range(elements.start, elements.stop, interval):
        span = slice(start, min(start + interval, elements.stop))
        scale_a, scale_b = scales[start // BLOCK]
        d = _ieee_sum(a[span], b[span], formats)
        if d.kind == "finite":
            d = exactly(accumulate(a[span], b[span], rule, formats))
        if rule.order == "EXACT":
            total = add(total, multiply(d, multiply(scale_a, scale_b)))
        elif rule.order == "A_THEN_B":
            total = round32(add(multiply(round32(multiply(round32(d), scale_a)), scale_b), total))
        else:
            total = round32(add(multiply(round32(d), round32(multiply(scale_a, scale_b))), total))
    return round32(total)


def _ieee_sum(a: Sequence[int], b: Sequence[int], formats: tuple[Element, Element]) -> Real:
    """Which infinity, if any, or NaN the products add up to."""
    total = exactly(Fraction(0))
    for x, y in zip(a, b, strict=True):
        if x & 0x7F >= formats[0].first_special or y & 0x7F >= formats[1].first_special:
            total = add(total, multiply(_real(x, formats[0]), _real(y, formats[1])))
    return total


def _real(code: int, fmt: Element) -> Real:
    if code & 0x7F >= fmt.first_special:
        return Real("infinite", code >> 7 == 1)
    return Real("finite", code >> 7 == 1, value_of(code, fmt))
