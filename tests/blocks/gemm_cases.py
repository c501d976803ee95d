"""Operands of the FP8 GEMM: the distributions that were compared with an H200 (NUMERICS 9), and worse ones."""

from typing import NamedTuple

import numpy as np

from mxsim.blocks import (
    EXACT,
    FP8_1X128,
    FP8_128X128,
    FP32_SEQUENTIAL,
    HOPPER,
    Accumulator,
    BlockTensor,
    PromotionOrder,
)
from mxsim.formats import E4M3, Rounding, encode

TZ, RNE = Rounding.TOWARD_ZERO, Rounding.TIES_TO_EVEN
ACCUMULATORS = [
    HOPPER,
    EXACT,
    FP32_SEQUENTIAL,
    Accumulator("nearest", term_rounding=RNE, sum_rounding=RNE),
    Accumulator("truncated, then nearest", 16, 10, TZ, RNE),
    Accumulator("nearest, then truncated", 8, 1, RNE, TZ),
    Accumulator("exact terms", 64, 13, None, TZ),
    Accumulator("22 bits", 32, 22),
    Accumulator("23 bits, one step a block", 128, 23),
    Accumulator("23 bits, nearest", 4, 23, RNE, RNE),
    Accumulator("exact in a block", fraction_bits=None),
    Accumulator("promoted every 32", promotion_interval=32),
    Accumulator("promoted every 64, scales first", promotion_interval=64, scale_order=PromotionOrder.SCALES_FIRST),
    Accumulator("promoted exactly", scale_order=PromotionOrder.EXACT),
]
LONG_SPANS = [  # need equal scales
    Accumulator("every 256", promotion_interval=256),
    Accumulator("never", promotion_interval=None),
    Accumulator("never, 22 bits", fraction_bits=22, promotion_interval=None),
    Accumulator("never, exact", fraction_bits=None, promotion_interval=None),
    Accumulator("never, float32", 1, 23, None, RNE, None),
]


class Case(NamedTuple):
    """Codes and scales of a [M, K] and b [N, K], scales of b for rows."""

    a: np.ndarray
    a_scales: np.ndarray
    b: np.ndarray
    b_scales: np.ndarray

    def operands(self) -> tuple[BlockTensor, BlockTensor]:
        return BlockTensor(self.a, self.a_scales, FP8_1X128), BlockTensor(self.b, self.b_scales, FP8_1X128)

    def tiled(self) -> tuple[BlockTensor, BlockTensor]:
        """The same codes, with the scales of every 128th row for tiles."""
        return self.operands()[0], BlockTensor(self.b, np.ascontiguousarray(self.b_scales[::128]), FP8_128X128)


def _finite(codes):
    return np.where((codes & 0x7F) == 0x7F, codes & 0x80, codes).astype(np.uint8)


def _normal(r, shape):
    return encode(r.normal(size=shape) * 64, E4M3)


def _sparse(r, shape):
    return np.where(r.random(shape) < 0.02, _finite(r.integers(0, 256, shape)), r.integers(0, 2, shape) * 0x80)


def _cancelling(r, shape):
    """Pairs of opposite products, some of them one code apart."""
    codes = _finite(r.integers(0, 256, shape))
    half = shape[1] // 2
    codes[:, half : 2 * half] = codes[:, :half] ^ 0x80
    return _finite(codes ^ (r.random(shape) < 0.01))


CODES = {
    "normal": _normal,
    "wide": lambda r, shape: encode(r.normal(size=shape) * 2.0 ** r.integers(-9, 8, shape), E4M3),
    "positive": lambda r, shape: encode(abs(r.normal(size=shape)) * 64, E4M3),
    "subnormal": lambda r, shape: r.integers(0, 8, shape) | r.integers(0, 2, shape) << 7,
    "sparse": _sparse,
    "random codes": lambda r, shape: _finite(r.integers(0, 256, shape)),
    "+-448": lambda r, shape: 0x7E | r.integers(0, 2, shape) << 7,
    "448 beside 2**-9": lambda r, shape: np.where(r.random(shape) < 0.1, 0x7E, 0x01) | r.integers(0, 2, shape) << 7,
    "cancelling": _cancelling,
    "zeros": lambda r, shape: r.integers(0, 2, shape) << 7,
}


def _bits(bits) -> np.ndarray:
    return np.asarray(bits).astype(np.uint32).view(np.float32)


def _one_subnormal(r, shape):
    scales = np.ones(shape, np.float32)
    scales[0, 0] = 2.0**-140
    return scales


SCALES = {
    "1": lambda r, shape: np.ones(shape, np.float32),
    "2**-20..2**20": lambda r, shape: np.ldexp(np.float32(1), r.integers(-20, 21, shape)),
    "one subnormal": _one_subnormal,
    "float32 near 1": lambda r, shape: np.exp(r.normal(size=shape)).astype(np.float32),
    "any bits": lambda r, shape: _bits(r.integers(0, 2**32, shape)),
    "any finite": lambda r, shape: _bits(r.integers(0, 255, shape) << 23 | r.integers(0, 2**23, shape)),
    "results near 2**-149": lambda r, shape: _bits(
        (127 - r.integers(60, 85, shape)) << 23 | r.integers(0, 2**23, shape)
    ),
    "results near 2**128": lambda r, shape: _bits(
        (127 + r.integers(50, 60, shape)) << 23 | r.integers(0, 2**23, shape)
    ),
    "infinite and 0": lambda r, shape: r.choice(np.array([0, -0.0, 1, np.inf, -np.inf], np.float32), shape),
}
EVERY_CASE = [(codes, "float32 near 1") for codes in CODES] + [("random codes", scales) for scales in SCALES]


def case(codes: str, scales: str, m: int, n: int, k: int, seed: int = 0) -> Case:
    """A pair of operands of the named kinds."""
    r = np.random.default_rng(seed)
    num_blocks = -(-k // 128)
    a, b = (np.asarray(CODES[codes](r, (rows, k))).astype(np.uint8) for rows in (m, n))
    if codes == "cancelling":
        b[:, k // 2 : 2 * (k // 2)] = b[:, : k // 2] & 0x7F  # alike in both halves, so that products cancel
        b[:, : k // 2] = b[:, k // 2 : 2 * (k // 2)]
    return Case(a, SCALES[scales](r, (m, num_blocks)), b, SCALES[scales](r, (n, num_blocks)))
