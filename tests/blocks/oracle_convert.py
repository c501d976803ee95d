"""The direct conversions by table: codes shifted by whole powers of two, every entry one rounding of a Fraction.

FP4 -> FP8: d = E - E_i, code = E4M3(v * 2**(headroom - d));   scale 2**(E - headroom)
FP8 -> FP4: X by the rule of amax * 2**s8, clamped;            code = E2M1(v * 2**(s8 - X))
FP8 -> FP8 (columns): code = E4M3(v * 2**(E_i - E))

Exponents are integers, NaN scales the value NAN; nothing here imports the package.
"""

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np

from tests import oracle
from tests.oracle import TWO, Number, Spec

NAN = 10**6  # stands for the exponent of a NaN scale
_LIMIT = 300  # shifts beyond +-300 do what +-300 does: everything is 0 or saturates


@cache
def _shifted(source: Spec, target: Spec, shift: int) -> tuple[int, ...]:
    """Code in target of every code of source, times 2**shift; NaN keeps its sign, or is 0 where target has none."""
    out = []
    for code in range(1 << source.bits):
        n = oracle.decode(code, source)
        if n.kind == "nan":
            out.append(0 if target.nan is None else oracle.nan_code(target, n.negative))
        else:
            assert n.magnitude is not None
            out.append(oracle.encode(Number(n.negative, "finite", n.magnitude * TWO**shift), target))
    return tuple(out)


@lru_cache(maxsize=8)
def shift_table(source: Spec, target: Spec, low: int, high: int) -> np.ndarray:
    """Rows for shifts low..high, columns for the codes of source."""
    return np.array([_shifted(source, target, shift) for shift in range(low, high + 1)], np.uint8)


def shifted(codes: np.ndarray, source: Spec, target: Spec, shift: np.ndarray) -> np.ndarray:
    """Codes times 2**shift, one shift an element."""
    shift = np.clip(shift, -_LIMIT, _LIMIT)
    low, high = (int(shift.min()), int(shift.max())) if shift.size else (0, 0)
    return shift_table(source, target, low, high)[shift - low, codes]


def spread(values: np.ndarray, size: int, count: int) -> np.ndarray:
    """One value a block along the last axis -> one an element, `count` of them."""
    return values.repeat(size, axis=-1)[..., :count]


def max_exponent(exponents: np.ndarray, ignored: np.ndarray, size: int, empty: int) -> np.ndarray:
    """Largest exponent that is not ignored among each `size` neighbours along axis 0; `empty` where there is none."""
    parts = []
    for start in range(0, exponents.shape[0], size):
        part = np.where(ignored[start : start + size], -NAN, exponents[start : start + size]).max(axis=0)
        parts.append(np.where(part == -NAN, empty, part))
    return np.stack(parts) if parts else np.zeros((0, *exponents.shape[1:]), int)


def fp4_to_fp8_rows(codes: np.ndarray, exponents: np.ndarray, headroom: int) -> tuple[np.ndarray, np.ndarray]:
    """(E4M3 codes, output exponents) of rows [m, K] with exponents [m, ceil(K / 32)]."""
    shared = max_exponent(exponents.T, exponents.T == NAN, 4, -127).T  # (m, ceil(K / 128))
    columns = codes.shape[1]
    by_element = spread(exponents, 32, columns)
    shift = headroom - (spread(shared, 128, columns) - np.where(by_element == NAN, 0, by_element))
    out = shifted(codes, oracle.E2M1, oracle.E4M3, shift)
    return np.where(by_element == NAN, 0x7F, out), shared - headroom


def columns_of(codes: np.ndarray, exponents: np.ndarray, source: Spec, headroom: int) -> tuple[np.ndarray, np.ndarray]:
    """(E4M3 codes [K, ceil128(m)], output exponents [K, ceil(m / 128)]) of the rows of one expert.

    source E2M1: blocks of 32, E starts at -127. source E4M3: blocks of 128, rows without a non-zero code are left out
    of E, which starts at 0.
    """
    block, empty = (32, -127) if source is oracle.E2M1 else (128, 0)
    rows, columns = codes.shape
    by_element = spread(exponents, block, columns)  # (m, K)
    ignored = by_element == NAN
    if source is oracle.E4M3:
        blank = [(codes[:, k : k + 128] & 0x7F == 0).all(axis=1) for k in range(0, columns, 128)]
        ignored = ignored | (spread(np.stack(blank, axis=1), 128, columns) if blank else False)
    shared = max_exponent(by_element, ignored, 128, empty)  # (ceil(m / 128), K)
    top = shared.repeat(128, axis=0)[:rows]
    shift = headroom - (top - np.where(by_element == NAN, 0, by_element))
    out = np.where(by_element == NAN, 0x7F, shifted(codes, source, oracle.E4M3, shift))
    padded = np.zeros((columns, 128 * len(shared)), np.uint8)
    padded[:, :rows] = out.T
    return padded, shared.T - headroom


def fp8_to_fp4_rows(codes: np.ndarray, exponents: np.ndarray, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """(E2M1 codes, E8M0 scale codes) of rows [m, K] with exponents [m, ceil(K / 128)]."""
    rows, columns = codes.shape
    blocks = -(-columns // 32)
    out, scales = np.zeros(codes.shape, np.uint8), np.full((rows, blocks), 0xFF, np.uint8)
    for b in range(blocks):
        part = slice(32 * b, min(32 * b + 32, columns))
        largest = (codes[:, part] & 0x7F).max(axis=1)
        exponent = exponents[:, b // 4]
        good = (largest != 0x7F) & (exponent != NAN)
        x = np.array(
            [_fp4_exponent(int(c), int(e), rule) if g else 0 for c, e, g in zip(largest, exponent, good, strict=True)],
            int,
        )
        scales[good, b] = x[good] + 127
        shift = np.where(good, exponent - x, 0)[:, None]
        out[:, part] = np.where(good[:, None], shifted(codes[:, part], oracle.E4M3, oracle.E2M1, shift), 0)
    return out, scales


@lru_cache(maxsize=1 << 20)
def _fp4_exponent(largest: int, exponent: int, rule: str) -> int:
    return oracle.scale_exponent(oracle.magnitude(largest, oracle.E4M3) * TWO**exponent, oracle.E2M1, rule)


def fp4_to_fp8_by_bits(code: int, headroom: int, d: int) -> int:
    """The bit form: exponent field ef + 6 + headroom - d, mantissa m << 2; below 1 the significand shifts right, RNE.

    0.5 becomes a normal number: ef = 0, mantissa 0. Zero is its sign alone.
    """
    sign, ef, m = code >> 3, (code >> 1) & 3, code & 1
    if code & 7 == 0:
        return sign << 7
    if ef == 0:
        m = 0
    field = ef + 6 + headroom - d
    if field >= 1:
        return sign << 7 | field << 3 | m << 2
    significand, shift = 8 | m << 2, 1 - field
    below, rest, half = significand >> shift, significand & ((1 << shift) - 1), 1 << (shift - 1)
    return sign << 7 | (below + (rest > half or (rest == half and below & 1 == 1)))


def powers_of_two(exponents: np.ndarray | Sequence[int]) -> np.ndarray:
    """float32 of exponents, NAN becomes NaN; every one of them exact, subnormals included."""
    exponents = np.asarray(exponents)
    bits = np.where(
        exponents == NAN,
        0x7FC00000,
        np.where(exponents >= -126, (exponents + 127) << 23, 1 << np.clip(exponents + 149, 0, 30)),
    )
    return bits.astype(np.uint32).view(np.float32)
