"""All 2**32 FP32 inputs, marked slow: `encode` against runs of equal codes built from Fractions, and against ml_dtypes.

Rounding is monotone, so the codes of the non-negative floats, in the order of their bits, form one run per code. A run
begins at the smallest float that rounds to its code: the middle between two values, or the float after it where the
tie goes down. The runs are checked in Fractions at both ends, which proves every input between them.
"""

import time
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from mxsim.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP16, INT8, FloatFormat, Overflow, Rounding, encode
from tests import oracle
from tests.compare import assert_codes_equal
from tests.oracle import Spec

CHUNK = 2**24
INF_BITS = 0x7F800000
NEAREST, SATURATE, TO_NONFINITE = Rounding.TIES_TO_EVEN, Overflow.SATURATE, Overflow.TO_NONFINITE

# format, rounding, overflow, ml_dtypes' name where it follows the same rule
SWEEPS = [
    (E2M1, NEAREST, SATURATE, "float4_e2m1fn"),
    (E2M3, NEAREST, SATURATE, "float6_e2m3fn"),
    (E3M2, NEAREST, SATURATE, "float6_e3m2fn"),
    (E4M3, NEAREST, SATURATE, None),
    (E4M3, NEAREST, TO_NONFINITE, "float8_e4m3fn"),
    (E5M2, NEAREST, SATURATE, None),
    (E5M2, NEAREST, TO_NONFINITE, "float8_e5m2"),
    (E8M0, NEAREST, SATURATE, None),
    (INT8, NEAREST, SATURATE, None),
    (BF16, NEAREST, TO_NONFINITE, "bfloat16"),
    (FP16, NEAREST, TO_NONFINITE, "float16"),
    *[(E4M3, rounding, TO_NONFINITE, None) for rounding in (Rounding.TIES_TO_AWAY, Rounding.UP, Rounding.TOWARD_ZERO)],
    (E2M1, Rounding.DOWN, SATURATE, None),
]


def first_float_above(x: Fraction, *, or_at: bool) -> int:
    """Bits of the smallest float32 > x (or >= x), for x >= 0."""
    bits = oracle.encode(x, oracle.FP32, "UP", "TO_NONFINITE")  # the smallest float >= x
    return bits + (not or_at and oracle.decode(bits, oracle.FP32).magnitude == x)


@cache
def runs(spec: Spec, rounding: str, overflow: str, negative: bool) -> tuple[np.ndarray, np.ndarray]:
    """(first magnitude bits, code) of every run of floats of one sign, infinity included; sorted, the first is 0."""
    starts = [0]
    for code in range(oracle.max_code(spec) + 1):
        low, high = oracle.magnitude_or_beyond(code, spec), oracle.magnitude_or_beyond(code + 1, spec)
        middle = (low + high) / 2
        away = rounding == ("DOWN" if negative else "UP")
        if rounding == "TIES_TO_EVEN":
            starts.append(first_float_above(middle, or_at=code % 2 == 1))
        elif rounding == "TIES_TO_AWAY":
            starts.append(first_float_above(middle, or_at=True))
        else:
            starts.append(first_float_above(low if away else high, or_at=not away))
    if not spec.signed and negative:
        starts = [0, 1]  # -0, and all that is NaN
    starts = [*sorted({s for s in starts if s < INF_BITS}), INF_BITS]
    sign = 0x80000000 if negative else 0

    def code_of(bits: int) -> int:
        return oracle.encode(oracle.decode(bits | sign, oracle.FP32), spec, rounding, overflow)

    codes = [code_of(s) for s in starts]
    for i, start in enumerate(starts[1:]):  # the last float of every run has the code of its first
        assert code_of(start - 1) == codes[i], (spec.name, rounding, overflow, hex(start))
    return np.array(starts, np.uint32), np.array(codes)


def expected(first: int, fmt: FloatFormat, rounding: Rounding, overflow: Overflow) -> np.ndarray:
    """Codes of the CHUNK floats from bits `first` on; of those from NaN on, the format's NaN or nothing."""
    spec, negative, low = oracle.SPECS[fmt.name], first >= 2**31, first % 2**31
    starts, codes = runs(spec, rounding.name, overflow.name, negative)
    if spec.nan is not None:
        starts = np.append(starts, np.uint32(INF_BITS + 1))
        codes = np.append(codes, oracle.nan_code(spec, negative))
    ends = np.append(starts[1:], np.uint32(2**31 if spec.nan is not None else INF_BITS + 1))
    lengths = np.clip(ends.astype(np.int64), low, low + CHUNK) - np.clip(starts.astype(np.int64), low, low + CHUNK)
    return np.repeat(codes.astype(fmt.code_dtype), lengths)


def their_codes(x: np.ndarray, name: str, fmt: FloatFormat) -> np.ndarray:
    with np.errstate(all="ignore"):
        codes = x.astype(np.float16 if name == "float16" else getattr(ml_dtypes, name)).view(fmt.code_dtype)
    return codes & fmt.code_dtype.type(fmt.num_codes - 1)


def sweep_chunk(first: int, fmt: FloatFormat, rounding: Rounding, overflow: Overflow, their_name: str | None) -> None:
    want = expected(first, fmt, rounding, overflow)
    bits = np.arange(first, first + CHUNK, dtype=np.uint32)
    x = bits.view(np.float32)
    label = f"{fmt} {rounding.name} {overflow.name}"
    if want.size < CHUNK:  # a format without NaN, and the chunk of infinity or one beyond
        with pytest.raises(ValueError, match="no code"):
            encode(x[want.size :], fmt, rounding=rounding, overflow=overflow)
        bits, x = bits[: want.size], x[: want.size]
    assert_codes_equal(encode(x, fmt, rounding=rounding, overflow=overflow), want, bits, label)
    if their_name is not None:
        theirs = their_codes(x, their_name, fmt)
        number = ~np.isnan(x) if first % 2**31 + CHUNK > INF_BITS else slice(None)  # NaN codes and payloads differ
        assert_codes_equal(theirs[number], want[number], bits[number], f"{label} against {their_name}")


@pytest.mark.slow
@pytest.mark.parametrize("case", SWEEPS, ids=lambda c: f"{c[0]}-{c[1].name}-{c[2].name}")
def test_every_float32(case, capsys):
    started = time.monotonic()
    for first in range(0, 2**32, CHUNK):
        sweep_chunk(first, *case)
        if first % (16 * CHUNK) == 15 * CHUNK:
            done = (first + CHUNK) / 2**32
            with capsys.disabled():
                print(
                    f"\r{case[0]} {case[1].name}: {done:4.0%}, {time.monotonic() - started:4.0f} s", end="", flush=True
                )
    with capsys.disabled():
        print()


@pytest.mark.parametrize("case", [c for c in SWEEPS if c[0].bits <= 8], ids=lambda c: f"{c[0]}-{c[1].name}-{c[2].name}")
def test_the_expected_codes_are_the_fractions(case):
    """The yardstick of the sweep at the start of every chunk and at random inputs."""
    fmt, rounding, overflow, _ = case
    spec = oracle.SPECS[fmt.name]
    offsets = [0, *np.random.default_rng(19).integers(0, CHUNK, 3)]
    for first in range(0, 2**32, 5 * CHUNK):
        want = expected(first, fmt, rounding, overflow)
        for offset in offsets:
            n = oracle.decode(first + int(offset), oracle.FP32)
            if n.kind != "nan" or spec.nan is not None:
                assert want[offset] == oracle.encode(n, spec, rounding.name, overflow.name)
