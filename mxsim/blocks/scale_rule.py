"""How a block's power-of-two scale follows from its largest magnitude (NUMERICS section 3.2)."""

from enum import Enum
from typing import Any

import numpy as np
from jaxtyping import Int64

from mxsim.formats import FloatFormat
from mxsim.formats.inputs import as_float

MIN_SCALE_EXPONENT = -127  # E8M0 code 0
MAX_SCALE_EXPONENT = 127  # E8M0 code 0xFE


class ScaleRule(Enum):
    """Rule for the scale exponent X, with amax = s * 2**e, 1 <= s < 2."""

    FLOOR = "floor"  # e - emax: OCP MX v1.0; magnitudes above max_finite * 2**X saturate
    RCEIL = "rceil"  # the smallest X with amax <= max_finite * 2**X: never saturates
    CEIL = "ceil"  # ceil(log2(amax)) - emax
    EVEN = "even"  # FLOOR of amax rounded to the element's mantissa bits, half up


def scale_exponent(amax: Any, element: FloatFormat, rule: ScaleRule) -> Int64[np.ndarray, "*shape"]:
    """Scale exponent X of a block with the given positive, finite amax, clamped to [-127, 127].

    Zero gives -127.

    Raises:
        TypeError: if amax holds no real numbers, or rule is no ScaleRule.
        ValueError: if amax is negative, infinite or NaN.

    Source: OCP MX v1.0 section 6.3 (FLOOR); torchao 0.18 for the other names.

    >>> from mxsim.formats import E2M1
    >>> [int(scale_exponent(7.0, E2M1, rule)) for rule in ScaleRule]
    [0, 1, 1, 1]
    """
    if not isinstance(rule, ScaleRule):
        raise TypeError(f"scale_exponent: rule is {rule!r}, needed a ScaleRule")
    x = as_float(amax, caller="scale_exponent", name="amax").astype(np.float64)
    if not bool((np.isfinite(x) & (x >= 0)).all()):
        raise ValueError("scale_exponent: amax holds a negative or non-finite value, needed finite amax >= 0")
    significand, exponent = np.frexp(x)  # 0.5 <= significand < 1, subnormals normalised
    fraction = (np.ldexp(significand, 53).astype(np.int64)) - 2**52
    clamped = scale_exponent_of_parts(exponent.astype(np.int64) - 1, fraction, 52, element, rule)
    return np.where(x == 0, MIN_SCALE_EXPONENT, clamped)


def scale_exponent_of_parts(
    exponent: Int64[np.ndarray, "*shape"],
    fraction: Int64[np.ndarray, "*shape"],
    fraction_bits: int,
    element: FloatFormat,
    rule: ScaleRule,
) -> Int64[np.ndarray, "*shape"]:
    """The rule in integers, for amax = (1 + fraction / 2**fraction_bits) * 2**exponent; fraction_bits > mantissa_bits.

    FLOOR adds nothing to exponent - emax; the others add 1 where the fraction is
    RCEIL: above max_finite's own fraction; CEIL: above zero; EVEN: at least 1 - 2**-(mantissa_bits + 1).
    """
    assert fraction_bits > element.mantissa_bits
    if rule is ScaleRule.RCEIL:
        max_fraction = element.max_code & ((1 << element.mantissa_bits) - 1)
        carry = fraction > max_fraction << (fraction_bits - element.mantissa_bits)
    elif rule is ScaleRule.CEIL:
        carry = fraction > 0
    elif rule is ScaleRule.EVEN:
        carry = fraction >= (1 << fraction_bits) - (1 << (fraction_bits - element.mantissa_bits - 1))
    else:
        carry = np.zeros_like(fraction, dtype=bool)
    x: np.ndarray = np.clip(exponent - element.emax + carry, MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT)
    return x
