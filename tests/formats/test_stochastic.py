"""Stochastic rounding: the magnitude rounds up iff r < position * 2**k, for every draw r; and the mean is the value."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from mxsim.formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    FP32,
    Overflow,
    Rounding,
    decode,
    encode,
    philox_bits,
    round_to,
)
from tests import oracle
from tests.compare import assert_codes_equal
from tests.formats.pairs import NARROW, TABLED, modes, name_of
from tests.formats.points import encodable, points32
from tests.formats.table_codec import encode_by_table

SR = Rounding.STOCHASTIC


def draw(x, fmt, r, k, **keywords):
    return encode(x, fmt, rounding=SR, random_bits=r, num_random_bits=k, **keywords)


def test_by_hand():
    # 2.75 lies 3/4 of the way from 2 (code 4) to 3 (code 5): six of eight draws go up
    r = np.arange(8, dtype=np.uint32)
    assert draw(np.full(8, 2.75), E2M1, r, 3).tolist() == [5] * 6 + [4] * 2
    assert draw(np.full(8, -2.75), E2M1, r, 3).tolist() == [13] * 6 + [12] * 2
    # 0.1 lies a fifth of the way from 0 to 0.5; 2**32 / 5 = 858993459.2
    r = np.array([0, 858993458, 858993459, 858993460, 2**32 - 1], np.uint32)
    assert draw(np.full(5, 0.1), E2M1, r, 32).tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("k", range(1, 9))
def test_j_of_all_draws_round_up_between_every_pair_of_E2M1(k):
    """x = low + (j / 2**k) * gap for every pair, every j and every draw: exactly j draws go up, the lowest j."""
    count = 2**k
    grid = [float(oracle.magnitude_or_beyond(c, oracle.E2M1)) for c in range(9)]
    j, r = np.arange(count), np.arange(count, dtype=np.uint32)
    for low_code, (low, high) in enumerate(pairwise(grid)):
        x = np.broadcast_to((low + j / count * (high - low))[:, None], (count, count))  # (j, r)
        draws = np.broadcast_to(r, (count, count))
        got = draw(x, E2M1, draws, k)
        want = np.minimum(low_code + (r[None, :] < j[:, None]), 7)  # beyond 6 saturates
        assert_codes_equal(got, want, x, f"E2M1 k={k}")
        assert_codes_equal(draw(-x, E2M1, draws, k), want | 8, x, f"E2M1 k={k}, negative")


@pytest.mark.parametrize("pair", NARROW, ids=name_of)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_every_draw_between_every_pair_of_neighbours(pair, k):
    """At position j / 2**k of each gap, at both its float64 neighbours, and at the ends, for all r (k = 8: some)."""
    fmt, spec = pair
    rng = np.random.default_rng(k)
    codes = np.arange(oracle.max_code(spec) + 1)
    exact = [oracle.magnitude_or_beyond(int(c), spec) for c in [*codes, codes[-1] + 1]]
    low, high = np.array([float(m) for m in exact[:-1]]), np.array([float(m) for m in exact[1:]])
    j = rng.integers(0, 2**k, codes.size)
    at = low + (high - low) * (j / 2**k)
    x = np.concatenate([at, np.nextafter(at, 0), np.nextafter(at, np.inf)])
    x = encodable(np.concatenate([x, -x]), spec)
    draws = np.arange(2**k) if k < 8 else np.unique(np.r_[0, 1, rng.integers(0, 256, 8), 254, 255])
    x, r = np.broadcast_arrays(x[:, None], draws[None, :].astype(np.uint32))
    for _, overflow in modes(spec, ("STOCHASTIC",)):
        want = encode_by_table(x, spec, "STOCHASTIC", overflow.name, r=r, k=k)
        assert_codes_equal(draw(x, fmt, r, k, overflow=overflow), want, x, f"{fmt} k={k} {overflow.name}")


@pytest.mark.parametrize("k", [1, 5, 31, 32])
def test_the_decision_is_the_fractions(k):
    rng = np.random.default_rng(k)
    x = rng.standard_normal(400) * np.exp2(rng.uniform(-8, 8, 400))
    for fmt, spec in ((E2M1, oracle.E2M1), (E4M3, oracle.E4M3), (BF16, oracle.BF16)):
        thresholds = np.array([oracle.position(Fraction(float(abs(v))), spec) * 2**k for v in x])
        for offset in (-1, 0, 1):  # draws beside the threshold
            r = np.array([min(max(-(-t.numerator // t.denominator) + offset, 0), 2**k - 1) for t in thresholds])
            want = [oracle.encode(float(v), spec, "STOCHASTIC", r=int(d), k=k) for v, d in zip(x, r, strict=True)]
            assert_codes_equal(draw(x, fmt, r.astype(np.uint32), k), np.array(want), x, f"{fmt} k={k}")


@pytest.mark.parametrize("pair", TABLED, ids=name_of)
def test_every_boundary_and_neighbour(pair):
    fmt, spec = pair
    x = encodable(points32(spec), spec)
    rng = np.random.default_rng(5)
    for k in (32, 8, 1):
        # random draws, and the two extremes: r = 0 rounds up whatever lies off the grid, r = 2**k - 1 almost nothing
        for r in (rng.integers(0, 2**k, x.size), np.zeros(x.size, np.int64), np.full(x.size, 2**k - 1)):
            for _, overflow in modes(spec, ("STOCHASTIC",)):
                want = encode_by_table(x, spec, "STOCHASTIC", overflow.name, r=r, k=k)
                got = draw(x, fmt, r.astype(np.uint32), k, overflow=overflow)
                assert_codes_equal(got, want, x, f"{fmt} k={k} {overflow.name}")


def test_only_the_low_k_bits_count():
    rng = np.random.default_rng(6)
    x = rng.standard_normal(5000)
    r = rng.integers(0, 2**32, x.size, dtype=np.uint32)
    for k in (1, 7, 8, 16, 31):
        low = r & np.uint32(2**k - 1)
        assert_codes_equal(draw(x, E4M3, r, k), draw(x, E4M3, low, k), x, f"k={k}")
    assert_codes_equal(encode(x, E4M3, rounding=SR, random_bits=r), draw(x, E4M3, r, 32), x, "k = 32 is the default")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint64, np.int64, ">u4"])
def test_draws_may_have_any_unsigned_width(dtype):
    x, r = np.linspace(-6, 6, 200), np.arange(200)
    assert_codes_equal(draw(x, E2M1, r.astype(dtype), 8), draw(x, E2M1, r.astype(np.uint32), 8), x)


def test_representable_values_never_move():
    r = philox_bits(1, 256)
    for fmt in (E2M1, E4M3, E5M2, E8M0, BF16):
        codes = np.resize(np.arange(fmt.max_code + 1), 256).astype(fmt.code_dtype)
        assert_codes_equal(encode(decode(codes, fmt), fmt, rounding=SR, random_bits=r), codes, None, str(fmt))
        assert_codes_equal(encode(decode(codes, fmt), fmt, rounding=SR, random_bits=r * 0), codes, None, str(fmt))


def test_special_inputs_take_no_draw():
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0])
    for r in (np.zeros(6, np.uint32), np.full(6, 2**32 - 1, np.uint32)):
        assert draw(x, E5M2, r, 32).tolist() == [0x7F, 0xFF, 0x7B, 0xFB, 0, 0x80]
        assert draw(x, E5M2, r, 32, overflow=Overflow.TO_NONFINITE).tolist() == [0x7F, 0xFF, 0x7C, 0xFC, 0, 0x80]
        assert draw(x, E8M0, r, 32).tolist() == [0xFF, 0xFF, 0xFF, 0xFF, 0, 0]


def test_overflow_is_a_draw_between_the_largest_value_and_the_next():
    x, r = np.full(4, 456.0), np.arange(4, dtype=np.uint32)  # a quarter of the way from 448 to 480
    assert draw(x, E4M3, r, 2).tolist() == [0x7E] * 4
    assert draw(x, E4M3, r, 2, overflow=Overflow.TO_NONFINITE).tolist() == [0x7F, 0x7E, 0x7E, 0x7E]
    assert draw(x * 4, E4M3, r, 2, overflow=Overflow.TO_NONFINITE).tolist() == [0x7F] * 4


def test_tiny_values_round_up_only_with_draw_zero():
    for x in (1e-30, 5e-324, 2.0**-149):
        assert draw(np.full(3, x), E4M3, np.array([0, 1, 2**32 - 1], np.uint32), 32).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("fmt", "value"),
    [(E2M1, 0.1), (E2M1, -2.3), (E4M3, 0.3), (E4M3, -1e-3), (E5M2, 1.125 * 2.0**-14), (BF16, np.pi), (FP32, 0.1)],
    ids=str,
)
def test_the_mean_of_many_draws_is_the_value(fmt, value):
    n = 200_000
    rounded = round_to(np.full(n, value), fmt, rounding=SR, random_bits=philox_bits(2024, n)).astype(np.float64)
    low, high = rounded.min(), rounded.max()
    assert low < value < high
    sigma = np.sqrt((value - low) * (high - value) / n)
    assert abs(rounded.mean() - value) < 5 * sigma


def test_the_mean_of_rounded_noise_is_its_mean():
    x = np.random.default_rng(7).standard_normal(400_000)
    error = round_to(x, E2M1, rounding=SR, random_bits=philox_bits(7, x.shape)) - np.clip(x, -6, 6)
    assert abs(error.mean()) < 5 * error.std() / np.sqrt(x.size)


def test_bad_draws_are_refused_by_name():
    x, r = np.ones((2, 3)), np.zeros((2, 3), np.uint32)
    with pytest.raises(ValueError, match="random_bits"):
        encode(x, E2M1, rounding=SR)
    with pytest.raises(ValueError, match="random_bits"):
        encode(x, E2M1, random_bits=r)
    with pytest.raises(ValueError, match=r"random_bits has shape \(3, 2\), needed \(2, 3\)"):
        encode(x, E2M1, rounding=SR, random_bits=r.T)
    with pytest.raises(ValueError, match="random_bits"):
        encode(x, E2M1, rounding=SR, random_bits=np.uint32(0))
    for k in (0, -1, 33):
        with pytest.raises(ValueError, match=f"num_random_bits is {k}, needed 1 to 32"):
            encode(x, E2M1, rounding=SR, random_bits=r, num_random_bits=k)
    for bad in (r.astype(np.float32), r.astype(bool), r.astype(np.int32) - 1):
        with pytest.raises((TypeError, ValueError), match="random_bits"):
            encode(x, E2M1, rounding=SR, random_bits=bad)


@pytest.mark.parametrize("k", [3.5, True, "8", None])
def test_a_number_of_random_bits_that_is_no_integer_is_refused(k):
    with pytest.raises(TypeError, match=f"num_random_bits is {k!r}, needed an integer"):
        encode([1.25], E4M3, rounding=Rounding.STOCHASTIC, random_bits=np.zeros(1, np.uint32), num_random_bits=k)
