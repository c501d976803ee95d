"""Operands of the FP8 GEMM: the distributions that were compared with an H200 (NUMERICS 9), and worse ones."""

from dataclasses import replace
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
from mxsim.formats import E4M3, E5M2, FloatFormat, Rounding, encode

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


Formats = tuple[FloatFormat, FloatFormat]
E5M2_PAIRS: list[Formats] = [(E5M2, E5M2), (E5M2, E4M3), (E4M3, E5M2)]


class Case(NamedTuple):
    """Codes and scales of a [M, K] and b [N, K], scales of b for rows."""

    a: np.ndarray
    a_scales: np.ndarray
    b: np.ndarray
    b_scales: np.ndarray
    formats: Formats = (E4M3, E4M3)

    def operands(self) -> tuple[BlockTensor, BlockTensor]:
        rows = [replace(FP8_1X128, element=fmt) for fmt in self.formats]
        return BlockTensor(self.a, self.a_scales, rows[0]), BlockTensor(self.b, self.b_scales, rows[1])

    def tiled(self) -> tuple[BlockTensor, BlockTensor]:
        """The same codes, with the scales of every 128th row for tiles."""
        tiles = replace(FP8_128X128, element=self.formats[1])
        return self.operands()[0], BlockTensor(self.b, np.ascontiguousarray(self.b_scales[::128]), tiles)


def _largest(fmt):
    return 0x7E if fmt is E4M3 else 0x7B


def _finite(codes, fmt):
    return np.where((codes & 0x7F) > _largest(fmt), codes & 0x80, codes).astype(np.uint8)


def _sign(r, shape):
    return r.integers(0, 2, shape) << 7


def _random(r, shape, fmt):
    return _finite(r.integers(0, 256, shape), fmt)


def _wide(r, shape, fmt):
    binades = (-9, 8) if fmt is E4M3 else (-17, 14)
    return encode(r.normal(size=shape) * 2.0 ** r.integers(*binades, shape), fmt)


def _cancelling(r, shape, fmt):
    """Pairs of opposite products, some of them one code apart."""
    codes = _random(r, shape, fmt)
    half = shape[1] // 2
    codes[:, half : 2 * half] = codes[:, :half] ^ 0x80
    return _finite(codes ^ (r.random(shape) < 0.01), fmt)


def _infinite(r, shape, fmt):
    """Of E5M2: in every other row one infinity, or two; zeros for them to meet."""
    codes = np.where(r.random(shape) < 0.01, 0, _random(r, shape, fmt)).astype(np.uint8)
    if fmt is E5M2 and shape[1]:
        for row in range(1, shape[0], 2):
            places = r.integers(0, shape[1], 1 + row // 2 % 2)
            codes[row, places] = 0x7C | _sign(r, len(places))
    return codes


CODES = {
    "normal": lambda r, shape, fmt: encode(r.normal(size=shape) * 64, fmt),
    "wide": _wide,
    "positive": lambda r, shape, fmt: encode(abs(r.normal(size=shape)) * 64, fmt),
    "subnormal": lambda r, shape, fmt: r.integers(0, 1 << fmt.mantissa_bits, shape) | _sign(r, shape),
    "sparse": lambda r, shape, fmt: np.where(r.random(shape) < 0.02, _random(r, shape, fmt), _sign(r, shape)),
    "random codes": _random,
    "+-largest": lambda r, shape, fmt: _largest(fmt) | _sign(r, shape),
    "largest beside smallest": lambda r, shape, fmt: (
        np.where(r.random(shape) < 0.1, _largest(fmt), 0x01) | _sign(r, shape)
    ),
    "cancelling": _cancelling,
    "zeros": lambda r, shape, fmt: _sign(r, shape),
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


E5M2_CASES = [*EVERY_CASE, ("infinities", "float32 near 1"), ("infinities", "infinite and 0")]


def case(codes: str, scales: str, m: int, n: int, k: int, seed: int = 0, formats: Formats = (E4M3, E4M3)) -> Case:
    """A pair of operands of the named kinds."""
    r = np.random.default_rng(seed)
    num_blocks = -(-k // 128)
    make = _infinite if codes == "infinities" else CODES[codes]
    a, b = (np.asarray(make(r, (rows, k), fmt)).astype(np.uint8) for rows, fmt in zip((m, n), formats, strict=True))
    if codes == "cancelling":
        b[:, k // 2 : 2 * (k // 2)] = b[:, : k // 2] & 0x7F  # alike in both halves, so that products cancel
        b[:, : k // 2] = b[:, k // 2 : 2 * (k // 2)]
    return Case(a, SCALES[scales](r, (m, num_blocks)), b, SCALES[scales](r, (n, num_blocks)), formats)
