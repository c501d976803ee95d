"""The same for large tensors: thresholds of the scale rules and of the elements as sorted float64 tables.

X(amax) = (number of thresholds that amax has passed) - 127;    code = searched in the table of the element's values

The tables come from the Fractions and hold them exactly; `test_scale_rule.py` compares them with the oracle at every
threshold and its neighbours, `test_quantize.py` whole blocks. Scaled values are exact: float64 moved by powers of two.
"""

from fractions import Fraction
from functools import cache

import numpy as np

from tests import oracle
from tests.blocks.oracle_blocks import LAYOUTS, Quantized, block_lengths
from tests.formats.table_codec import encode_by_table
from tests.oracle import TWO, Spec


@cache
def thresholds(spec: Spec, rule: str) -> tuple[np.ndarray, str]:
    """(t[j] = the amax where the scale exponent becomes j - 126, side): j = 0..253; a side of searchsorted.

    FLOOR: at 2**(X + emax). RCEIL: above max_finite * 2**(X - 1). CEIL: above 2**(X - 1 + emax). EVEN: at the middle
    between 2**(X + emax) and the value of mantissa_bits fraction bits just below it, which ties to the even 2**(...).
    """
    first, inclusive = {
        "FLOOR": (TWO ** oracle.emax(spec), True),
        "RCEIL": (oracle.max_finite(spec) / 2, False),
        "CEIL": (TWO ** oracle.emax(spec) / 2, False),
        "EVEN": (TWO ** oracle.emax(spec) * (1 - Fraction(1, 2 ** (spec.mantissa_bits + 2))), True),
    }[rule]
    exact = [first * TWO**x for x in range(-126, 128)]
    table = np.array([float(t) for t in exact])
    assert all(Fraction(t) == want for t, want in zip(table.tolist(), exact, strict=True))
    return table, "right" if inclusive else "left"


def scale_exponents(amax: np.ndarray, spec: Spec, rule: str) -> np.ndarray:
    """Scale exponents of finite amax >= 0, clamped to [-127, 127]."""
    table, side = thresholds(spec, rule)
    return np.searchsorted(table, np.asarray(amax, np.float64), side=side) - 127


def quantize_by_table(
    x: np.ndarray,
    name: str,
    *,
    axis: int = -1,
    rule: str | None = None,
    rounding: str = "TIES_TO_EVEN",
    random_words: np.ndarray | None = None,
    k: int = 32,
) -> Quantized:
    """A whole tensor under power-of-two scales (every format but NVFP4)."""
    layout = LAYOUTS[name]
    lengths = block_lengths(name, x.ndim, axis)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        split = _split(np.asarray(x, np.float64), lengths)
    amax = np.abs(split).max(axis=tuple(range(1, 2 * x.ndim, 2)), keepdims=True)
    poisoned = ~np.isfinite(amax)
    finite_amax = np.where(poisoned, 0.0, amax)
    exponent = scale_exponents(finite_amax, layout.element, rule or str(layout.default_rule))
    if layout.scale == "FP32":
        exponent = np.where(finite_amax == 0, 0, exponent)
    scaled = np.ldexp(np.where(poisoned, 0.0, split), -exponent)
    words = None if random_words is None else _split(random_words, lengths)
    codes = encode_by_table(scaled, layout.element, rounding, r=words, k=k)
    if layout.scale == "FP32":
        codes = np.where(poisoned, 0x7F, codes)
        scales = np.where(poisoned, np.nan, np.ldexp(1.0, exponent)).astype(np.float32)
    else:
        scales = np.where(poisoned, 0xFF, exponent + 127).astype(np.uint8)
    return Quantized(_join(codes.astype(np.uint8), x.shape), scales.reshape(scales.shape[::2]))


def _split(x: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """(n0, n1, ...) -> (blocks0, l0, blocks1, l1, ...), filled with zeros."""
    padded = np.pad(x, [(0, -n % length) for n, length in zip(x.shape, lengths, strict=True)])
    return padded.reshape([m for n, length in zip(padded.shape, lengths, strict=True) for m in (n // length, length)])


def _join(split: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    whole = split.reshape([b * length for b, length in zip(split.shape[::2], split.shape[1::2], strict=True)])
    return np.ascontiguousarray(whole[tuple(slice(n) for n in shape)])
