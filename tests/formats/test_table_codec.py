"""The array encoder of the tests is the Fractions: every boundary of the narrow formats, a sample of the wide ones."""

import numpy as np
import pytest

from tests import oracle
from tests.compare import assert_codes_equal
from tests.formats.pairs import NARROW, TABLED, modes, name_of
from tests.formats.points import encodable, points64
from tests.formats.table_codec import encode_by_table

WIDE = [pair for pair in TABLED if pair not in NARROW]


def sampled_points(spec, rng) -> np.ndarray:
    """All the points of a narrow format; 600 of a wide one, its ends among them."""
    x = encodable(points64(spec), spec)
    if spec.bits <= 8:
        return x
    half = x.size // 2  # both halves are sorted by magnitude
    ends = np.r_[0:40, half - 40 : half + 40, x.size - 40 : x.size]
    return np.concatenate([x[ends], rng.choice(x, 440)])


@pytest.mark.parametrize("pair", NARROW + WIDE, ids=name_of)
def test_table_codec_equals_the_fractions(pair):
    _, spec = pair
    x = sampled_points(spec, np.random.default_rng(1))
    numbers = [oracle.number(float(v)) for v in x]
    for rounding, overflow in modes(spec):
        want = np.array([oracle.encode(n, spec, rounding.name, overflow.name) for n in numbers])
        got = encode_by_table(x, spec, rounding.name, overflow.name)
        assert_codes_equal(got, want, x, f"{spec.name} {rounding.name} {overflow.name}")


@pytest.mark.parametrize("pair", NARROW, ids=name_of)
@pytest.mark.parametrize("k", [1, 3, 8, 32])
def test_table_codec_draws_like_the_fractions(pair, k):
    _, spec = pair
    rng = np.random.default_rng(k)
    top = float(oracle.beyond_max(spec))
    x = np.concatenate([rng.uniform(-1.2 * top, 1.2 * top, 60), np.exp2(rng.uniform(-12, np.log2(top), 60))])
    x = encodable(x, spec)
    r = rng.integers(0, 2**k, x.size)
    for overflow in oracle.OVERFLOWS[: 1 + (spec.specials != "NONE")]:
        want = [oracle.encode(float(v), spec, "STOCHASTIC", overflow, r=int(d), k=k) for v, d in zip(x, r, strict=True)]
        got = encode_by_table(x, spec, "STOCHASTIC", overflow, r=r, k=k)
        assert_codes_equal(got, np.array(want), x, f"{spec.name} k={k} {overflow}")


def test_nan_and_its_sign():
    x = np.array([np.nan, -np.nan])
    assert encode_by_table(x, oracle.E4M3).tolist() == [0x7F, 0xFF]
    assert encode_by_table(x, oracle.E5M2).tolist() == [0x7F, 0xFF]
    assert encode_by_table(x, oracle.E8M0).tolist() == [0xFF, 0xFF]
    assert encode_by_table(x, oracle.USER_SPECS["float8_e4m3fnuz"]).tolist() == [0x80, 0x80]
    assert encode_by_table(x, oracle.E2M1).tolist() == [-1, -1]
