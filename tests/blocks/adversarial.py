"""Blocks that sit where a quantizer can go wrong: on every value and tie after scaling, and one ulp to either side."""

from fractions import Fraction

import ml_dtypes
import numpy as np

from tests import oracle
from tests.formats.points import boundaries
from tests.oracle import TWO, Spec

BF16 = np.dtype(ml_dtypes.bfloat16)
# 1 <= s < 2 around the thresholds of the rules; the largest s of a dtype is added to them.
SIGNIFICANDS = (1.0, 1.25, 1.5, 1.75, 1.875, 1.9375)


def ulp_neighbours(x: np.ndarray) -> np.ndarray:
    """x > 0, the next number below and the next above, in x's own dtype."""
    bits = x.view(f"u{x.dtype.itemsize}")
    return np.unique(np.concatenate([bits - 1, bits, bits + 1])).view(x.dtype)


def largest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)


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
    for s in every_s:
        amax = Fraction(float(s)) * TWO**exponent
        if not smallest(dtype) <= amax <= largest(dtype) or float(np.array(float(amax)).astype(dtype)) != amax:
            continue
        x = oracle.scale_exponent(amax, spec, rule)
        exact = [b * TWO**x for b in boundaries(spec, range(oracle.max_code(spec) + 1))]
        exact = [b for b in exact if smallest(dtype) <= b <= amax and _holds(b, dtype)]
        pool = ulp_neighbours(np.array([float(b) for b in exact]).astype(dtype)) if exact else np.zeros(0, dtype)
        pool = np.concatenate([pool[pool.astype(np.float64) <= float(amax)], np.zeros(2, dtype)])
        if s != every_s[-1]:
            pool = rng.choice(pool, min(len(pool), size - 1), replace=False)
        count = -(-len(pool) // (size - 1))
        chosen = np.concatenate([pool, rng.choice(pool, count * (size - 1) - len(pool))])
        rows = rng.permutation(chosen).reshape(count, size - 1)
        place = rng.integers(0, size, count)
        block = np.array([np.insert(row, p, dtype.type(float(amax))) for row, p in zip(rows, place, strict=True)])
        blocks.append(np.where(rng.random(block.shape) < 0.5, block, -block).astype(dtype))
    return np.concatenate(blocks) if blocks else np.zeros((0, size), dtype)


def _holds(value: Fraction, dtype: np.dtype) -> bool:
    return Fraction(float(np.array(float(value)).astype(dtype))) == value


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
