"""An encoder for whole arrays, built from the oracle's Fractions: a sorted table, searchsorted, and one exact position.

below = searchsorted(magnitudes, |x|) - 1;   position = (|x| - magnitudes[below]) / (magnitudes[below + 1] - ...[below])

Every step is exact in float64: the table's values have at most 25 bits, the difference of two neighbours is a power of
two, and |x| - below has no more bits than x. `test_table_codec.py` checks it against the Fractions themselves.
"""

from fractions import Fraction
from functools import cache

import numpy as np

from tests import oracle
from tests.oracle import Spec


@cache
def _grid(spec: Spec) -> np.ndarray:
    """Finite magnitudes by code, and the one beyond the largest."""
    exact = [*(oracle.magnitude(c, spec) for c in range(oracle.max_code(spec) + 1)), oracle.beyond_max(spec)]
    grid = np.array([float(m) for m in exact])
    assert all(Fraction(g) == m for g, m in zip(grid.tolist(), exact, strict=True))
    return grid


def encode_by_table(
    x: np.ndarray, spec: Spec, rounding: str = "TIES_TO_EVEN", overflow: str = "SATURATE", *, r=None, k: int = 32
) -> np.ndarray:
    """Codes (int64) of float values of at most 64 bits; NaN where the format has none gives -1."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        x = np.asarray(x).astype(np.float64)
    negative, magnitude = np.signbit(x), np.abs(x)
    nan, inf = np.isnan(x), np.isinf(x)
    grid, top = _grid(spec), oracle.max_code(spec)

    beyond = magnitude >= grid[-1]
    a = np.where(nan, 0.0, np.where(beyond, grid[top], magnitude))
    underflow = a < grid[0]  # only a format without zero
    below = np.clip(np.searchsorted(grid, a, side="right") - 1, 0, top)
    position = np.where(underflow, 0.0, (a - grid[below]) / (grid[below + 1] - grid[below]))

    if rounding == "TIES_TO_EVEN":
        up = (position > 0.5) | ((position == 0.5) & (below % 2 == 1))
    elif rounding == "TIES_TO_AWAY":
        up = position >= 0.5
    elif rounding == "STOCHASTIC":
        up = (np.asarray(r).astype(np.uint64) & np.uint64(2**k - 1)).astype(np.float64) < position * 2.0**k
    else:
        away = {"TOWARD_ZERO": np.zeros_like(negative), "UP": ~negative, "DOWN": negative}[rounding]
        up = (position > 0) & away
    code = below + up
    over = beyond | (code > top)
    if rounding in ("TOWARD_ZERO", "UP", "DOWN"):
        over &= away
    code = np.minimum(code, top)

    def signed(c, negative=negative):
        if not spec.signed:
            return c
        if spec.twos_complement:
            return np.where(negative, -c, c) % (1 << spec.bits)
        keeps_sign = negative & (c != 0) if spec.specials == "NAN_IS_NEGATIVE_ZERO" else negative
        return np.where(keeps_sign, c | spec.sign_bit, c)

    code = signed(code)
    over |= inf
    if overflow == "SATURATE":
        code = np.where(over, signed(np.full_like(below, top)), code)
    else:
        nonfinite = [oracle.nonfinite_code(spec, n) for n in (False, True)]
        code = np.where(over, np.where(negative, nonfinite[1], nonfinite[0]), code)
    if not spec.signed:
        nan = nan | inf | (x < 0)
    nan_codes = [-1, -1] if spec.nan is None else [oracle.nan_code(spec, n and spec.signed) for n in (False, True)]
    return np.where(nan, np.where(negative, nan_codes[1], nan_codes[0]), code)
