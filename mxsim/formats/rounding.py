"""Rounding and overflow modes, and the random bits of stochastic rounding."""

import operator
from enum import Enum
from math import prod

import numpy as np
from jaxtyping import UInt32


class Rounding(Enum):
    """What happens to a value between two neighbours; each name has its tie rule."""

    TIES_TO_EVEN = "ties_to_even"  # nearest, ties to the even code
    TIES_TO_AWAY = "ties_to_away"  # nearest, ties to the larger magnitude
    TOWARD_ZERO = "toward_zero"
    UP = "up"  # toward +infinity
    DOWN = "down"  # toward -infinity
    STOCHASTIC = "stochastic"  # to the larger magnitude iff random_bits < frac * 2**num_random_bits


class Overflow(Enum):
    """What happens to a value that rounds beyond max_finite."""

    SATURATE = "saturate"  # +-max_finite, infinities too
    TO_NONFINITE = "to_nonfinite"  # infinity, or NaN in a format without infinity


_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], np.uint32)
_NUM_ROUNDS = 10


def philox4x32(
    counter: UInt32[np.ndarray, "*batch 4"], key: UInt32[np.ndarray, " 2"]
) -> UInt32[np.ndarray, "*batch 4"]:
    """Philox4x32-10: four random 32-bit words for each 128-bit counter.

    One round maps (c0, c1, c2, c3) to (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)), and the key
    grows by the two Weyl constants between rounds.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    >>> [hex(word) for word in philox4x32(np.zeros(4, np.uint32), np.zeros(2, np.uint32))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, np.uint32), -1, 0)
    key = np.array(key, np.uint32)
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 64 bits wide
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)).astype(np.uint32) ^ c1 ^ key[0],
            product1.astype(np.uint32),
            (product0 >> np.uint64(32)).astype(np.uint32) ^ c3 ^ key[1],
            product0.astype(np.uint32),
        )
        key += _KEY_STEPS  # modulo 2**32
    return np.stack([c0, c1, c2, c3], axis=-1)


def philox_bits(seed: int, shape: int | tuple[int, ...], *, start: int = 0) -> UInt32[np.ndarray, "..."]:
    """The 32 random bits of elements start, start + 1, ... in row-major order, as an array of the given shape.

    Element i takes word i mod 4 of philox4x32 with counter (low, high word of i // 4, 0, 0) and key (low, high word of
    seed). A long tensor can be drawn in pieces: the bits depend on seed and index only.

    Raises:
        TypeError: if seed or start is no integer.
        ValueError: if seed or the last index is negative or needs more than 64 bits.

    >>> hex(philox_bits(0, 5)[3])
    '0x9b00dbd8'
    """
    shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(shape)
    seed, start = operator.index(seed), operator.index(start)  # a NumPy integer would wrap around
    if any(size < 0 for size in shape):
        raise ValueError(f"philox_bits: shape is {shape}, needed sizes of 0 or more")
    count = prod(shape)
    if not 0 <= seed < 2**64:
        raise ValueError(f"philox_bits: seed is {seed}, needed 0 to 2**64 - 1")
    if start < 0 or start + count > 2**66:
        raise ValueError(f"philox_bits: start is {start} and count {count}, needed indices from 0 to 2**66 - 1")
    first = start // 4
    num_counters = -(-(start + count) // 4) - first
    index = np.arange(num_counters, dtype=np.uint64) + np.uint64(first)
    counter = np.zeros((num_counters, 4), np.uint32)
    counter[:, 0] = index & np.uint64(0xFFFFFFFF)
    counter[:, 1] = index >> np.uint64(32)
    words = philox4x32(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32))
    skip = start - 4 * first
    return words.reshape(-1)[skip : skip + count].reshape(shape)
