"""Numbers as text, and text as numbers, without hiding a rounding."""

import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from fractions import Fraction

from mxsim.commands.bad_input import BadInput

_CODE_PREFIXES = ("0x", "0b", "0o")


class InputKind(StrEnum):
    """How an argument is to be read."""

    CODE = "code"
    VALUE = "value"


@dataclass(frozen=True)
class ParsedNumber:
    """A float64 and whether the text stood for exactly that."""

    value: float
    is_exact: bool


def looks_like_code(text: str) -> bool:
    """Whether the text is an integer with a base prefix: 0x7e, 0b111. A hex float has a point or a p: 0x1.8p3."""
    lowered = text.strip().lower()
    if not lowered.startswith(_CODE_PREFIXES):
        return False
    try:
        int(lowered, 0)
    except ValueError:
        return False
    return True


def parse_code(text: str) -> int:
    """A code: 0x7e, 0b111, 0o17 or 126.

    Raises:
        BadInput: if it is no integer, or negative.
    """
    try:
        code = int(text.strip(), 0)
    except ValueError:
        raise BadInput(f"{_quoted(text)} is not a code, needed an integer such as 0x7e, 0b1111110 or 126") from None
    if code < 0:
        raise BadInput(f"{_quoted(text)} is not a code: a code is not negative")
    return code


def parse_number(text: str) -> ParsedNumber:
    """The float64 nearest to a decimal number, hex float, fraction such as 1/3, integer with a prefix, nan or inf.

    Raises:
        BadInput: if it is none of these.
    """
    stripped = text.strip()
    try:
        if "/" in stripped:
            return _nearest(Fraction(stripped))
        unsigned = stripped.lower().lstrip("+-")
        if looks_like_code(unsigned):
            return _nearest(Fraction(int(stripped, 0)))
        if unsigned.startswith("0x"):
            return ParsedNumber(float.fromhex(stripped), _hex_is_exact(stripped))
        value = float(stripped)
        return ParsedNumber(value, math.isnan(value) or Decimal(stripped) == Decimal(value))
    except (ValueError, ZeroDivisionError, OverflowError, InvalidOperation):
        raise BadInput(
            f"{_quoted(text)} is neither a number (1.5, -3e-4, 0x1.8p3, 1/3, nan, inf) nor a code (0x7e)"
        ) from None


def exact_decimal(x: float | Fraction) -> str:
    """All digits of a float, or of a fraction over a power of two.

    >>> exact_decimal(0.1)
    '0.1000000000000000055511151231257827021181583404541015625'
    >>> exact_decimal(-0.0)
    '-0'
    """
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    exact = Fraction(x)
    places = exact.denominator.bit_length() - 1
    assert exact.denominator == 1 << places
    digits = str(abs(exact.numerator) * 5**places).zfill(places + 1)  # n / 2**p = n * 5**p / 10**p
    text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    return f"-{text}" if math.copysign(1, x) < 0 else text


def short_text(x: float | Fraction | None, width: int = 12) -> str:
    """x in about `width` characters: all its digits if they fit, else a power of two, else rounded and marked so.

    >>> [short_text(x) for x in (448.0, 2.0**-127, 0.1, None)]
    ['448', '2^-127', '≈0.1', '-']
    """
    if x is None:
        return "-"
    if isinstance(x, float) and not math.isfinite(x):
        return {math.inf: "inf", -math.inf: "-inf"}.get(x, "nan")
    exact = Fraction(x)
    is_dyadic = exact.denominator & (exact.denominator - 1) == 0
    if is_dyadic and abs(exact.numerator).bit_length() < 64 and exact.denominator < 2**40:
        text = exact_decimal(x)
        if len(text) <= width:
            return text
    magnitude = abs(exact)
    if is_dyadic and magnitude and magnitude.numerator & (magnitude.numerator - 1) == 0:
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        return f"{'-' if exact < 0 else ''}2^{exponent}"
    digits = max(3, min(9, width - 3))
    text = f"{float(x):.{digits}g}"
    while len(text) > width - 1 and digits > 3:
        digits -= 1
        text = f"{float(x):.{digits}g}"
    return f"≈{text}"


def short_hex(x: float) -> str:
    """The hex float without trailing zeros.

    >>> short_hex(-7.0)
    '-0x1.cp+2'
    """
    mantissa, separator, exponent = x.hex().partition("p")
    return mantissa.rstrip("0").rstrip(".") + separator + exponent if "." in mantissa else x.hex()


def percent(share: Fraction | float | None) -> str:
    """A share as a percentage with three digits.

    >>> [percent(x) for x in (Fraction(1, 3), 0.0, 0.00001234, None)]
    ['33.3 %', '0 %', '0.00123 %', '-']
    """
    if share is None or (isinstance(share, float) and math.isnan(share)):
        return "-"
    hundredths = float(share) * 100
    if hundredths >= 999.5:
        return f"{hundredths:.0f} %" if hundredths < 1e6 else f"{hundredths:.0e} %"
    return f"{hundredths:.3g} %" if hundredths >= 0.001 or hundredths == 0 else f"{hundredths:.0e} %"


def _nearest(x: Fraction) -> ParsedNumber:
    try:
        value = float(x)
    except OverflowError:
        value = math.copysign(math.inf, x)
    return ParsedNumber(value, math.isfinite(value) and Fraction(value) == x)


def _hex_is_exact(text: str) -> bool:
    mantissa, _, exponent = text.lower().lstrip("+-").removeprefix("0x").partition("p")
    whole, _, fraction = mantissa.partition(".")
    if len(mantissa) > 300 or len(exponent) > 6:
        return False
    exact = Fraction(int((whole + fraction) or "0", 16)) * Fraction(2) ** (int(exponent or 0) - 4 * len(fraction))
    return Fraction(abs(float.fromhex(text))) == exact


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
