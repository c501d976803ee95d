"""The four scale rules are the specification's, at every threshold of every binade."""

from fractions import Fraction

import numpy as np
import pytest

from mxsim.blocks import ScaleRule, scale_exponent
from mxsim.formats import E2M1, E2M3, E3M2, E4M3, E5M2, FORMATS, INT8
from tests import oracle
from tests.blocks.adversarial import significands, ulp_neighbours
from tests.blocks.oracle_table import scale_exponents, thresholds
from tests.blocks.pairs import ELEMENTS, RULES
from tests.compare import assert_codes_equal
from tests.oracle import TWO

BOTH = pytest.mark.parametrize("fmt, spec", ELEMENTS, ids=lambda f: f.name)
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
FLT_MAX = np.finfo(np.float32).max


def test_the_rules_by_hand():
    at = {rule.name: scale_exponent([4.0, 6.0, 6.5, 7.0, 7.5], E2M1, rule).tolist() for rule in RULES}
    assert at == {"FLOOR": [0] * 5, "RCEIL": [0, 0, 1, 1, 1], "CEIL": [0, 1, 1, 1, 1], "EVEN": [0, 0, 0, 1, 1]}


@pytest.mark.parametrize(
    "fmt, rceil, even",
    [
        (E2M1, 1.5, 1.75),
        (E2M3, 1.875, 1.9375),
        (E3M2, 1.75, 1.875),
        (E4M3, 1.75, 1.9375),
        (E5M2, 1.75, 1.875),
        (INT8, 127 / 64, 2 - 2**-7),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_thresholds_are_those_of_the_table(fmt, rceil, even):
    for threshold, rule, at_it in ((rceil, ScaleRule.RCEIL, 0), (even, ScaleRule.EVEN, 1), (1.0, ScaleRule.CEIL, 0)):
        amax = np.array([threshold - 2**-52 if threshold > 1 else 1.0, threshold, threshold + 2**-52])
        assert (scale_exponent(amax, fmt, rule) + fmt.emax).tolist() == [0, at_it, 1]


def test_FLT_MAX_takes_these_scale_codes():
    codes = {fmt.name: [int(scale_exponent(FLT_MAX, fmt, rule)) + 127 for rule in RULES] for fmt, _ in ELEMENTS}
    assert codes == {
        "E2M1": [252, 253, 253, 253],
        "E2M3": [252, 253, 253, 253],
        "E3M2": [250, 251, 251, 251],
        "E4M3": [246, 247, 247, 247],
        "E5M2": [239, 240, 240, 240],
        "INT8": [254, 254, 254, 254],
    }


@BOTH
@EACH_RULE
def test_the_table_is_the_oracle_at_every_threshold_and_its_neighbours(fmt, spec, rule):
    table, _ = thresholds(spec, rule.name)
    for t in table.tolist():
        beside = [np.nextafter(t, 0), t, np.nextafter(t, np.inf)]
        want = [oracle.scale_exponent(Fraction(float(b)), spec, rule.name) for b in beside]
        assert scale_exponents(beside, spec, rule.name).tolist() == want, t
    # The rules are monotone, so that between two thresholds nothing can change; the ends are the clamps.
    ends = [TWO**-1074, Fraction(float(table[0])) / 2, Fraction(float(table[-1])) * 2, Fraction(np.finfo(float).max)]
    assert [oracle.scale_exponent(e, spec, rule.name) for e in ends] == [-127, -127, 127, 127]


@BOTH
@EACH_RULE
def test_every_BF16_amax_has_the_exact_exponent(fmt, spec, rule):
    bits = np.arange(1, 0x7F80, dtype=np.uint32) << np.uint32(16)  # all positive finite ones
    amax = bits.view(np.float32)
    got = scale_exponent(amax, fmt, rule)
    assert got.dtype == np.int64
    assert_codes_equal(got, scale_exponents(amax, spec, rule.name), bits, f"{fmt} {rule.name}")


@BOTH
@EACH_RULE
def test_FP32_amax_around_the_thresholds_of_every_binade(fmt, spec, rule):
    s = significands(np.dtype(np.float32))
    normal = np.ldexp(s[:, None], np.arange(-126, 128)).astype(np.float32).ravel()
    all_subnormal_thresholds = np.ldexp(s[:, None], np.arange(-149, -126)).astype(np.float32).ravel()
    amax = np.concatenate([normal, ulp_neighbours(all_subnormal_thresholds[all_subnormal_thresholds > 0]), [FLT_MAX]])
    amax = np.unique(amax[amax > 0].astype(np.float32))
    assert amax[0] == np.float32(2**-149)
    assert_codes_equal(scale_exponent(amax, fmt, rule), scale_exponents(amax, spec, rule.name), amax, f"{fmt} {rule}")


@BOTH
@EACH_RULE
def test_float64_amax_beyond_float32_clamps(fmt, spec, rule):
    s = significands(np.dtype(np.float64))
    with np.errstate(under="ignore"):
        amax = np.unique(np.ldexp(s[:, None], np.arange(-1074, 1024)).ravel())
    amax = np.append(amax[amax > 0], np.finfo(np.float64).max)
    got = scale_exponent(amax, fmt, rule)
    assert_codes_equal(got, scale_exponents(amax, spec, rule.name), amax, f"{fmt} {rule.name}")
    assert (got.min(), got.max()) == (-127, 127)


@BOTH
def test_the_rules_are_ordered(fmt, spec):
    amax = np.abs(np.random.default_rng(1).standard_cauchy(10_000))
    x = {rule: scale_exponent(amax, fmt, rule) for rule in RULES}
    for rule in (ScaleRule.RCEIL, ScaleRule.EVEN):
        assert (x[ScaleRule.FLOOR] <= x[rule]).all()
        assert (x[rule] <= x[ScaleRule.CEIL]).all()
    assert (x[ScaleRule.CEIL] <= x[ScaleRule.FLOOR] + 1).all()


@BOTH
def test_RCEIL_never_saturates_and_no_smaller_scale_does_that(fmt, spec):
    amax = np.ldexp(significands(np.dtype(np.float32))[:, None], np.arange(-60, 60)).ravel()
    x = scale_exponent(amax, fmt, ScaleRule.RCEIL)
    largest = float(oracle.max_finite(spec))
    assert (amax <= np.ldexp(largest, x)).all()
    assert (amax > np.ldexp(largest, x - 1)).all()


@EACH_RULE
def test_zero_has_the_smallest_exponent(rule):
    assert scale_exponent([0.0, -0.0], E2M1, rule).tolist() == [-127, -127]


@EACH_RULE
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32])
def test_the_dtype_of_amax_does_not_matter(rule, dtype):
    amax = np.arange(1, 2049).astype(dtype)
    assert_codes_equal(scale_exponent(amax, E4M3, rule), scale_exponent(amax.astype(np.float64), E4M3, rule))
    assert scale_exponent(amax.reshape(2, -1, 1), E4M3, rule).shape == (2, 1024, 1)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf, -np.inf, -(2.0**-149)])
def test_amax_that_is_negative_or_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="amax holds a negative or non-finite value"):
        scale_exponent(np.array([1.0, bad]), E2M1, ScaleRule.FLOOR)


@pytest.mark.parametrize("bad", ["1.0", 1j, [None], np.array([True])], ids=["text", "complex", "object", "bool"])
def test_amax_that_is_no_real_number_is_refused(bad):
    with pytest.raises(TypeError, match="amax"):
        scale_exponent(bad, E2M1, ScaleRule.FLOOR)


@pytest.mark.parametrize("bad", ["rceil", 1, None])
def test_a_rule_that_is_no_ScaleRule_is_refused(bad):
    with pytest.raises(TypeError, match="rule"):
        scale_exponent(1.0, FORMATS["E2M1"], bad)
