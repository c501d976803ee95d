"""Blocks that sit where a quantizer can go wrong: on every value and tie after scaling, and one ulp to either side."""

from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np

from tests import oracle
from tests.formats.points import boundaries
from tests.oracle import Spec

# 1 <= s < 2 around the thresholds of the rules; the largest s of a dtype is added to them.
SIGNIFICANDS = (1.0, 1.25, 1.5, 1.75, 1.875, 1.9375)


def ulp_neighbours(x: np.ndarray) -> np.ndarray:
    """x > 0, the next number below and the next above, in x's own dtype."""
    bits = x.view(f"u{x.dtype.itemsize}")
    return np.unique(np.concatenate([bits - 1, bits, bits + 1])).view(x.dtype)


def smallest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).smallest_subnormal)


def significands(dtype: np.dtype) -> np.ndarray:
    """1 <= s < 2 in the given dtype: each threshold, one ulp below and above it."""
    around = ulp_neighbours(np.array(SIGNIFICANDS).astype(dtype)).astype(np.float64)
    top = np.array([2.0 - float(ml_dtypes.finfo(dtype).eps)])
    return np.unique(np.concatenate([around[around >= 1], top]))


def adversarial_blocks(
    spec: Spec, rule: str, exponent: int, dtype: np.dtype | type, *, size: int = 32, seed: int = 0
) -> np.ndarray:
    """Blocks [n, size] whose amax is s * 2**exponent, for every s of `significands`; X follows by the rule.

    Their other elements are values and ties of the format times 2**X, with the neighbours of each, as far as they stay
    below amax and dtype holds them: all of them under the largest s, a sample under the others. Signs and the place of
    amax vary, zeros of both signs stand among them.
    """
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    blocks = []
    every_s = significands(dtype)
    with np.errstate(under="ignore", over="ignore"):
        every_amax = np.ldexp(every_s, exponent)
        held = (every_amax.astype(dtype).astype(np.float64) == every_amax) & (every_amax > 0) & np.isfinite(every_amax)
    for amax in every_amax[held].tolist():
        x = oracle.scale_exponent(Fraction(amax), spec, rule)
        exact = np.ldexp(_boundaries(spec), x)  # float64 holds them: X is -127 at least
        exact = exact[(exact >= smallest(dtype)) & (exact <= amax)]
        exact = exact[exact.astype(dtype).astype(np.float64) == exact].astype(dtype)
        pool = ulp_neighbours(exact) if len(exact) else exact
        pool = np.concatenate([pool[pool.astype(np.float64) <= amax], np.zeros(2, dtype)])
        if amax != every_amax[-1]:
            pool = rng.choice(pool, min(len(pool), size - 1), replace=False)
        count = -(-len(pool) // (size - 1))
        chosen = np.concatenate([pool, rng.choice(pool, count * (size - 1) - len(pool))])
        rows = rng.permutation(chosen).reshape(count, size - 1)
        place = rng.integers(0, size, count)
        block = np.array([np.insert(row, p, dtype.type(amax)) for row, p in zip(rows, place, strict=True)])
        blocks.append(np.where(rng.random(block.shape) < 0.5, block, -block).astype(dtype))
    return np.concatenate(blocks) if blocks else np.zeros((0, size), dtype)


@cache
def _boundaries(spec: Spec) -> np.ndarray:
    """Every value and every tie of the format, and those one binade above; exact in float64."""
    return np.array([float(b) for b in boundaries(spec, range(oracle.max_code(spec) + 1))])


def random_bit_patterns(shape: tuple[int, ...], seed: int, dtype: type = np.float32) -> np.ndarray:
    """Floats of every magnitude, NaN and infinity among them."""
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2 ** (8 * unsigned.itemsize), shape, unsigned).view(dtype)


def wide_range(shape: tuple[int, ...], seed: int, exponents: tuple[int, int] = (-40, 40)) -> np.ndarray:
    """Finite float32 of random magnitude 2**low to 2**high, one in ten of them zero: no two places look alike."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(*exponents, shape)
    return np.where(rng.random(shape) < 0.1, np.copysign(0.0, x), x).astype(np.float32)
