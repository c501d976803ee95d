"""Where an encoder can go wrong: every value of a format, every midpoint, and their nearest neighbours."""

from collections.abc import Iterable
from fractions import Fraction
from functools import cache

import numpy as np

from tests import oracle
from tests.oracle import Spec


def boundaries(spec: Spec, codes: Iterable[int]) -> list[Fraction]:
    """The magnitude of each code and the middle between it and the next one; one more binade beyond the largest."""
    out: list[Fraction] = []
    for code in codes:
        low, high = oracle.magnitude_or_beyond(code, spec), oracle.magnitude_or_beyond(code + 1, spec)
        out += [low, (low + high) / 2]
        if code == oracle.max_code(spec):
            out += [high, 2 * high]
        if code == 0 and low > 0:
            out += [low / 2, low * Fraction(3, 4)]  # a format without zero: underflow
    return out


@cache
def points64(spec: Spec) -> np.ndarray:
    """float64, +-: 0, the boundaries and the next float64 on either side, the smallest, the largest, infinity."""
    return _both_signs(_around(boundaries(spec, _codes(spec)), np.float64))


@cache
def points32(spec: Spec) -> np.ndarray:
    """The same in float32, whose neighbours of a boundary lie 2**29 times as far away."""
    flt_max = oracle.max_finite(oracle.FP32)
    return _both_signs(_around([b for b in boundaries(spec, _codes(spec)) if b <= flt_max], np.float32))


def _codes(spec: Spec) -> range:
    return range(oracle.max_code(spec) + 1)


def _around(exact: list[Fraction], dtype: type) -> np.ndarray:
    x = np.array([float(b) for b in exact]).astype(dtype)
    assert all(Fraction(float(v)) == b for v, b in zip(x, exact, strict=True))
    info = np.finfo(dtype)
    ends = np.array([0, info.smallest_subnormal, info.max, np.inf], dtype)
    around = np.concatenate([x, np.nextafter(x, dtype(np.inf)), np.nextafter(x, dtype(-np.inf))])
    return np.unique(np.concatenate([np.abs(around), ends]))


def _both_signs(x: np.ndarray) -> np.ndarray:
    out = np.concatenate([x, -x])
    out.setflags(write=False)
    return out


def encodable(x: np.ndarray, spec: Spec) -> np.ndarray:
    """Without what the format has no code for: NaN where it has none, and negative or infinite if also unsigned."""
    if spec.nan is not None:
        return x
    return x[~np.isnan(x)] if spec.signed else x[np.isfinite(x) & (x >= 0)]
