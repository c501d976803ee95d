"""Inputs of the golden vectors: few blocks, every special case, the same bits on every machine.

Random bits are Philox's, whose stream is written down, and not NumPy's, whose may change.
"""

import numpy as np

from mxsim.formats import E2M1, FloatFormat, decode, philox_bits

Array = np.ndarray

_SIGN = 0x8000
_NAN_SCALE = 0xFF
_BF16_SPECIALS = (0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF)  # infinities, NaN of several kinds


def draw(seed: int, shape: tuple[int, ...], low: int, high: int) -> Array:
    """Integers in [low, high)."""
    bits = philox_bits(seed, shape).astype(np.int64)
    drawn: Array = low + (bits * (high - low) >> 32)
    return drawn


def bf16_blocks(block: int, element: FloatFormat, seed: int) -> Array:
    """Blocks [n, block] of bfloat16 bits.

    Every value and tie of the element format and the bfloat16 numbers next to each tie, below an amax of max_finite and
    of 2**emax, at scales from the smallest to the largest; amax around every rule's threshold; zeros of both signs;
    subnormal numbers; one NaN or infinity at either end of a block; any bits but NaN and infinity.
    """
    values = decode(np.arange(element.max_code + 1, dtype=np.uint8), element).astype(np.float64)
    ties = (values[:-1] + values[1:]) / 2
    parts = []
    for exponent in (-128, -125, -124, -62, -7, 1, 2, 3, 9, 62, 126):
        scale = 2.0 ** (exponent - element.emax)
        near = np.concatenate([(bf16_bits(ties * scale)[:, None] + [-1, 0, 1]).reshape(-1), bf16_bits(values * scale)])
        for largest in (element.max_finite, 2.0**element.emax):
            top = int(bf16_bits(np.array([largest * scale]))[0])
            below = np.clip(near, 0, top)
            rows = np.full((-(-below.size // (block - 1)), block), top)
            rows[:, 1:] = np.resize(below, (rows.shape[0], block - 1))
            parts += list(rows | np.where(np.arange(block) % 2, _SIGN, 0) ^ (len(parts) % 2 * _SIGN))
    for exponent in (-133, -126, -40, 0, 3, 118):
        for factor in (1.0, 1.25, 1.5, 1.75, 1.875, 1.9375):
            amax = int(bf16_bits(np.array([factor * 2.0**exponent]))[0])
            for step in (-1, 0, 1):
                top = max(amax + step, 1)
                lower = np.maximum(top - draw(seed + len(parts), (block,), 0, 12 << 7), 0)
                lower[len(parts) % block] = top
                parts.append(lower | draw(seed + 500 + len(parts), (block,), 0, 2) * _SIGN)
    zeros = np.zeros(block, np.int64)
    parts += [zeros, zeros | _SIGN, np.where(np.arange(block) % 2, _SIGN, 0)]
    parts += [draw(seed + 1000, (block,), 0, 0x80), draw(seed + 1001, (block,), 0, 0x100) | _SIGN]
    parts += [zeros + 0x7F7F, np.where(np.arange(block) % 2, 1, 0xFF7F)]
    for i, special in enumerate(_BF16_SPECIALS):
        poisoned = draw(seed + 1100 + i, (block,), 0x3E00, 0x4100)
        poisoned[0 if i % 2 else block - 1] = special
        parts.append(poisoned)
    any_bits = draw(seed + 1200, (8, block), 0, 0x7F80) | draw(seed + 1201, (8, block), 0, 2) * _SIGN
    return np.concatenate([np.array(parts), any_bits]).astype(np.uint16)


def bf16_bits(x: Array) -> Array:
    """bfloat16 bits of numbers, rounded to nearest."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
    rounded: Array = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return rounded


def as_rows(blocks: Array, columns: int) -> Array:
    """[n, block] -> [rows, columns], blocks along the rows; the first ones again where the last row is not full."""
    per_row = columns // blocks.shape[1]
    return np.resize(blocks, (-(-blocks.shape[0] // per_row), columns))


def float32_rows(seed: int) -> Array:
    """Blocks of 32 as `bf16_blocks`, each number a few float32 steps off; subnormal float32 numbers."""
    bits = bf16_blocks(32, E2M1, seed).astype(np.int64) << 16
    magnitude, sign = bits & 0x7FFFFFFF, bits & 0x80000000
    moved = np.clip(magnitude + draw(seed + 1, bits.shape, -2, 3), 0, 0x7F7FFFFF)
    magnitude = np.where((magnitude >= 0x7F800000) | (magnitude == 0), magnitude, moved)
    tiny = draw(seed + 2, (4, 32), 0, 1 << 20)
    return as_rows(np.concatenate([magnitude | sign, tiny]).astype(np.uint32), 128).view(np.float32)


def float16_rows(seed: int) -> Array:
    """Any float16 bits within one block's reach, zeros, subnormal numbers, NaN and infinity."""
    top = draw(seed, (48, 1), 0x0400, 0x7C00)
    bits = np.maximum(top - draw(seed + 1, (48, 32), 0, 8 << 10), 0) | draw(seed + 2, (48, 32), 0, 2) * _SIGN
    bits[0] = 0
    bits[1] = draw(seed + 3, (32,), 0, 0x0400)
    bits[2, 5], bits[3, 31] = 0x7C00, 0xFE00
    return as_rows(bits.astype(np.uint16), 128).view(np.float16)


def fp4_rows(num_rows: int, columns: int, seed: int) -> tuple[Array, Array]:
    """(packed codes, scales). Row i has scales i mod 24 apart, where there is room; every code in every block.

    Then NaN scales alone, in part and throughout, the smallest and the largest scale side by side, any scales.
    """
    codes = (np.arange(columns) + np.arange(num_rows)[:, None]) % E2M1.num_codes
    blocks = columns // 32
    gap = np.arange(num_rows)[:, None] % 24
    scales = draw(seed, (num_rows, 1), 40, 230) - gap * draw(seed + 1, (num_rows, blocks), 0, 2)
    kind = np.arange(num_rows) // 24 % 4
    scales = np.where((kind == 3)[:, None], draw(seed + 2, scales.shape, 0, 256), scales)
    scales[5 % num_rows, 0] = _NAN_SCALE
    scales[6 % num_rows] = _NAN_SCALE
    scales[7 % num_rows] = np.where(np.arange(blocks) % 2, 0, 254)
    scales[8 % num_rows] = np.where(np.arange(blocks) % 2, 0, 3)
    codes[9 % num_rows] &= 8  # zeros
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), scales.astype(np.uint8)


def fp8_rows(num_rows: int, columns: int, seed: int) -> tuple[Array, Array]:
    """(E4M3 codes, power-of-two scales): rows of all codes, without NaN, of subnormals, of zeros; any scale, NaN."""
    codes = (np.arange(columns) * 37 + np.arange(num_rows)[:, None] * 11) % 256
    kind = (np.arange(num_rows) % 6)[:, None]
    without_nan = np.where(codes & 0x7F == 0x7F, codes ^ 0x40, codes)
    codes = np.where(kind == 0, codes, without_nan)
    codes = np.where(kind == 1, codes & 0x87, codes)
    codes = np.where((kind == 2) & (np.arange(num_rows)[:, None] % 12 == 2), codes & 0x80, codes)
    shape = (num_rows, columns // 128)
    exponents = draw(seed, shape, -6, 7)
    exponents = np.where(kind == 3, draw(seed + 1, shape, -149, 128), exponents)
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32))
    scales[4 % num_rows, 0] = np.nan
    scales[10 % num_rows] = np.nan
    return codes.astype(np.uint8), scales.astype(np.float32)


def gemm_operand(rows: int, columns: int, seed: int) -> Array:
    """E4M3 codes: rows of ordinary numbers, of any, of subnormals, of 448 beside the smallest, and of zeros."""
    ordinary = draw(seed, (rows, columns), 0x28, 0x48) | draw(seed + 1, (rows, columns), 0, 2) << 7
    anything = draw(seed + 2, (rows, columns), 0, 0x7F) | draw(seed + 3, (rows, columns), 0, 2) << 7
    extreme = np.where(draw(seed + 4, (rows, columns), 0, 8) == 0, 0x7E, 0x01)
    kind = (np.arange(rows) % 5)[:, None]
    codes = np.select([kind == 0, kind == 1, kind == 2, kind == 3], [ordinary, anything, anything & 0x87, extreme], 0)
    return codes.astype(np.uint8)


def gemm_scales(rows: int, blocks: int, seed: int) -> Array:
    """float32 scales, no powers of two."""
    significands = draw(seed, (rows, blocks), 1 << 23, 1 << 24)
    return np.ldexp(significands, draw(seed + 1, (rows, blocks), -30, -20).astype(np.int32)).astype(np.float32)
