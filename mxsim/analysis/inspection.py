"""What the formats make of one number or one code: fields, neighbours, roundings, and scale rules. Data only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction

import numpy as np

from mxsim.blocks import BlockFormat, ScaleRule, quantize
from mxsim.formats import CodeForm, FloatFormat, Overflow, Rounding, decode, encode

DETERMINISTIC_ROUNDINGS: tuple[Rounding, ...] = tuple(r for r in Rounding if r is not Rounding.STOCHASTIC)


class Kind(Enum):
    """What a code stands for."""

    ZERO = "zero"
    SUBNORMAL = "subnormal"
    NORMAL = "normal"
    FIXED_POINT = "fixed point"
    INFINITY = "infinity"
    NAN = "NaN"


@dataclass(frozen=True)
class InspectedCode:
    """One code of a format, taken apart.

    `fields` are the bits of sign, exponent and mantissa, each as a string of 0 and 1; a field that the format lacks is
    empty, and a two's complement code is all sign and mantissa. A finite value = significand * 2**exponent, with the
    implicit bit counted in the significand. `below` and `above` are the next smaller and larger values (None: there is
    none), `ulp` the distance between values in this binade; both are None for NaN.
    """

    format: FloatFormat
    code: int
    kind: Kind
    fields: tuple[str, str, str]
    value: float
    significand: int | None
    exponent: int | None
    below: float | None
    above: float | None
    ulp: float | None


@dataclass(frozen=True)
class RoundedNumber:
    """How a format treats a number x.

    `nearest` is its code under TIES_TO_EVEN and SATURATE, None where the format has no code for x. `below` < x <
    `above` are the next values on either side, infinities included (None: there is none). `away_share` is how far x has
    come on the way from the neighbour nearer to zero to the other one: the probability with which STOCHASTIC takes the
    larger magnitude (from 1 on, beyond the largest value: always); 0 for an exact x, None where it means nothing.
    `outcomes` has the value that each rounding gives in each overflow mode; None where encode refuses.
    """

    number: float
    format: FloatFormat
    nearest: InspectedCode | None
    error: Fraction | None
    relative_error: Fraction | None
    below: float | None
    above: float | None
    away_share: Fraction | None
    outcomes: dict[Rounding, dict[Overflow, float | None]]


@dataclass(frozen=True)
class BlockMaximum:
    """A block (in NVFP4 also a tensor) that holds the number x and nothing larger, under rules that treat it alike.

    `scale_exponent` is X, None where the scale is no power of two or NaN; `scaled` = x / scale is what is encoded.
    `value` = scale * element; a NaN or infinite x poisons the block: scale and value are NaN, `scaled` is None.
    """

    format: BlockFormat
    rules: tuple[ScaleRule, ...]
    scale: float
    scale_code: int | None
    scale_exponent: int | None
    scaled: Fraction | None
    code: int
    element: float
    value: float
    relative_error: Fraction | None


def inspect_code(code: int, fmt: FloatFormat) -> InspectedCode:
    """Take a code apart.

    Raises:
        ValueError: if fmt has no such code.

    >>> from mxsim.formats import E4M3
    >>> c = inspect_code(0x7E, E4M3)
    >>> c.fields, c.significand, c.exponent, c.value, c.below, c.above
    (('0', '1111', '110'), 14, 5, 448.0, 416.0, None)
    """
    if not 0 <= code < fmt.num_codes:
        raise ValueError(f"inspect_code: code is {code:#x}, needed 0 to {fmt.num_codes - 1:#x} for {fmt}")
    value = _decode(code, fmt)
    fields = _fields(code, fmt)
    if not np.isfinite(value):
        kind = Kind.NAN if np.isnan(value) else Kind.INFINITY
        below, above = (None, None) if kind is Kind.NAN else _around_infinity(value, fmt)
        return InspectedCode(fmt, code, kind, fields, value, None, None, below, above, None)
    significand, exponent = _significand_and_exponent(code, fmt)
    if significand == 0:
        kind = Kind.ZERO
    elif fmt.code_form is CodeForm.TWOS_COMPLEMENT:
        kind = Kind.FIXED_POINT
    elif fmt.has_subnormals and abs(significand) < 1 << fmt.mantissa_bits:
        kind = Kind.SUBNORMAL
    else:
        kind = Kind.NORMAL
    step = _signed_magnitude(code, fmt)
    below, above = _value_at(step - 1, fmt), _value_at(step + 1, fmt)
    return InspectedCode(fmt, code, kind, fields, value, significand, exponent, below, above, 2.0**exponent)


def round_number(x: float, fmt: FloatFormat) -> RoundedNumber:
    """Round x to fmt in every mode.

    >>> from mxsim.formats import E2M1
    >>> r = round_number(0.3, E2M1)
    >>> r.nearest.value, r.below, r.above, round(float(r.away_share), 3)
    (0.5, 0.0, 0.5, 0.6)
    """
    outcomes = {
        rounding: {overflow: _outcome(x, fmt, rounding, overflow) for overflow in Overflow}
        for rounding in DETERMINISTIC_ROUNDINGS
    }
    try:
        code = int(encode(np.float64(x), fmt))
    except ValueError:
        return RoundedNumber(x, fmt, None, None, None, None, None, None, outcomes)
    nearest = inspect_code(code, fmt)
    if not (np.isfinite(x) and np.isfinite(nearest.value)):
        return RoundedNumber(x, fmt, nearest, None, None, None, None, None, outcomes)
    error = Fraction(nearest.value) - Fraction(x)
    lower, upper = (outcomes[mode][Overflow.SATURATE] for mode in (Rounding.DOWN, Rounding.UP))
    assert lower is not None
    assert upper is not None
    return RoundedNumber(
        number=x,
        format=fmt,
        nearest=nearest,
        error=error,
        relative_error=abs(error / Fraction(x)) if x else None,
        below=lower if lower < x else nearest.below,
        above=upper if upper > x else nearest.above,
        away_share=_away_share(x, lower, upper, fmt),
        outcomes=outcomes,
    )


def as_block_maximum(x: float, fmt: BlockFormat) -> list[BlockMaximum]:
    """Quantize a block whose largest magnitude is |x| by every rule that fmt has, one entry for each distinct outcome.

    >>> from mxsim.blocks import MXFP4
    >>> [(b.scale_exponent, [r.name for r in b.rules], b.value) for b in as_block_maximum(7.0, MXFP4)]
    [(0, ['FLOOR'], 6.0), (1, ['RCEIL', 'CEIL', 'EVEN'], 8.0)]
    """
    rules: Sequence[ScaleRule | None] = list(ScaleRule) if fmt.default_scale_rule else [None]
    entries: dict[tuple[float, int], BlockMaximum] = {}
    for rule in rules:
        entry = _block_maximum(x, fmt, rule)
        known = entries.get((_key(entry.scale), entry.code))
        merged = entry if known is None else replace(known, rules=(*known.rules, *entry.rules))
        entries[_key(entry.scale), entry.code] = merged
    return list(entries.values())


# ------------------------------------------------------------------------------------------------------------- codes
def _decode(code: int, fmt: FloatFormat) -> float:
    return float(decode(np.array(code, fmt.code_dtype), fmt))


def _fields(code: int, fmt: FloatFormat) -> tuple[str, str, str]:
    bits = f"{code:0{fmt.bits}b}"
    num_exponent_bits = 0 if fmt.code_form is CodeForm.TWOS_COMPLEMENT else fmt.exponent_bits
    start = int(fmt.signed)
    return bits[:start], bits[start : start + num_exponent_bits], bits[start + num_exponent_bits :]


def _signed_magnitude(code: int, fmt: FloatFormat) -> int:
    """Steps from zero (from the smallest value, without a zero) along the finite values; -0 is 0."""
    if fmt.code_form is CodeForm.TWOS_COMPLEMENT:
        return code - fmt.num_codes if code & fmt.sign_mask else code
    magnitude = code & fmt.magnitude_mask
    return -magnitude if code & fmt.sign_mask else magnitude


def _value_at(step: int, fmt: FloatFormat) -> float | None:
    """The value so many steps from zero; infinity one step beyond the largest; None where there is nothing."""
    magnitude = abs(step)
    if magnitude > fmt.max_code:
        if magnitude == fmt.max_code + 1 and fmt.has_inf:
            return float(np.copysign(np.inf, step))
        return None
    if step < 0 and not fmt.signed:
        return None
    if fmt.code_form is CodeForm.TWOS_COMPLEMENT:
        return _decode(step % fmt.num_codes, fmt)
    return _decode(magnitude | (fmt.sign_mask if step < 0 else 0), fmt)


def _around_infinity(value: float, fmt: FloatFormat) -> tuple[float | None, float | None]:
    return (fmt.max_finite, None) if value > 0 else (None, -fmt.max_finite)


def _significand_and_exponent(code: int, fmt: FloatFormat) -> tuple[int, int]:
    """value = significand * 2**exponent, the exponent being that of the binade's ulp."""
    magnitude = abs(_signed_magnitude(code, fmt))
    biased_exponent = magnitude >> fmt.mantissa_bits
    if fmt.code_form is CodeForm.TWOS_COMPLEMENT:
        biased_exponent = 0  # fixed point: one spacing throughout
    exponent = max(biased_exponent - (fmt.bias or 0), fmt.emin) - fmt.mantissa_bits
    significand = int(Fraction(abs(_decode(code, fmt))) / Fraction(2) ** exponent)
    return (-significand if code & fmt.sign_mask else significand), exponent


# ---------------------------------------------------------------------------------------------------------- rounding
def _outcome(x: float, fmt: FloatFormat, rounding: Rounding, overflow: Overflow) -> float | None:
    try:
        return _decode(int(encode(np.float64(x), fmt, rounding=rounding, overflow=overflow)), fmt)
    except ValueError:
        return None


def _away_share(x: float, lower: float, upper: float, fmt: FloatFormat) -> Fraction | None:
    near, far = (lower, upper) if x >= 0 else (upper, lower)
    if abs(x) < abs(near):  # below the smallest value of a format without zero
        return None
    if near == x:
        return Fraction(0)
    if near == far:  # beyond the largest value: the next step would be an ulp away
        step = Fraction(2) ** (fmt.emax - fmt.mantissa_bits)
    else:
        step = abs(Fraction(far) - Fraction(near))
    return abs(Fraction(x) - Fraction(near)) / step


# ------------------------------------------------------------------------------------------------------------ blocks
def _block_maximum(x: float, fmt: BlockFormat, rule: ScaleRule | None) -> BlockMaximum:
    t = quantize(np.full((1, 1), x, np.float64), fmt, scale_rule=rule)
    code = int(t.codes[0, 0])
    scale = float(t.scale_values()[0, 0]) * (1.0 if t.tensor_scale is None else float(t.tensor_scale))
    is_usable = bool(np.isfinite(scale)) and scale > 0
    value = float(t.dequantize(np.float64)[0, 0])
    fraction, exponent = np.frexp(scale) if is_usable else (np.nan, 0)
    return BlockMaximum(
        format=fmt,
        rules=(rule,) if rule else (),
        scale=scale,
        scale_code=int(t.scales[0, 0]) if t.scales.dtype == np.uint8 else None,
        scale_exponent=int(exponent) - 1 if fraction == 0.5 and rule else None,
        scaled=Fraction(x) / Fraction(scale) if is_usable else None,
        code=code,
        element=_decode(code, fmt.element),
        value=value,
        relative_error=abs((Fraction(value) - Fraction(x)) / Fraction(x)) if is_usable and x else None,
    )


def _key(scale: float) -> float:
    return -1.0 if np.isnan(scale) else scale  # NaN equals no NaN
