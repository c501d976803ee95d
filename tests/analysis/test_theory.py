"""Expected errors equal enumeration and double integrals; measured ones agree with them within sampling error."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from mxsim.analysis.theory import (
    compare_with_theory,
    expected_error,
    independent_sample,
    measured_error,
)
from mxsim.blocks import (
    FP8_1X128,
    FP8_128X128,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    BlockFormat,
    ScaleRule,
    quantize,
)

RULES = list(ScaleRule)
DISTRIBUTIONS = {
    "normal": stats.norm(),
    "Laplace": stats.laplace(scale=3),
    "Student t, 5": stats.t(5),
    "Student t, 3": stats.t(3),
}
E2M1_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


# -------------------------------------------------------------------------------------------------------- enumeration
@pytest.mark.parametrize("rule", RULES)
def test_of_few_values_it_is_the_mean_over_all_blocks(rule):
    """Values on both sides of every threshold of every rule, and on it; -2 and 2 have one magnitude."""
    x = np.array([1e-3, -0.26, 2.0, -2.0, 3.0, 3.5, -3.6, 4.0, 4.5, -6.0, 6.5, 7.0, 7.75, 0.0])
    triples = np.array(list(itertools.product(x, repeat=3)))
    fmt = replace(MXFP4, name="blocks of 3", block_shape=(1, 3))
    t = quantize(triples, fmt, scale_rule=rule)
    error = t.dequantize(np.float64) - triples
    scale = t.scale_values()
    scale[triples.any(axis=-1) == 0] = 1  # of zeros: no error either way
    expected = expected_error(x, fmt, scale_rule=rule)
    assert expected.signal == pytest.approx(np.square(triples).mean(), rel=1e-12)
    assert expected.noise == pytest.approx(np.square(error).mean(), rel=1e-12)
    assert expected.scaled_signal == pytest.approx(np.square(triples / scale).mean(), rel=1e-12)
    assert expected.scaled_noise == pytest.approx(np.square(error / scale).mean(), rel=1e-12)


@pytest.mark.parametrize("fmt", [MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("rule", RULES)
def test_so_in_every_element_format(fmt, rule):
    x = np.random.default_rng(0).standard_normal(40) * 2.0 ** np.arange(-20, 20)
    pairs = np.array(list(itertools.product(x, repeat=2)))
    fmt = replace(fmt, name="blocks of 2", block_shape=(1, 2))
    error = quantize(pairs, fmt, scale_rule=rule).dequantize(np.float64) - pairs
    expected = expected_error(x, fmt, scale_rule=rule)
    assert expected.noise == pytest.approx(np.square(error).mean(), rel=1e-12)


def test_nvfp4_of_few_values():
    """The blocks beside one that holds the tensor's amax, whatever that is."""
    x = np.array([0.001, 0.3, -1.0, 2.0, 4.1, 17.0, -300.0, 1e4])
    pairs = np.array(list(itertools.product(x, repeat=2)))
    tensor = np.concatenate([pairs, [[1e5, 0]]]).reshape(-1, 2)
    blocks = np.zeros((len(tensor), 16))
    blocks[:, :2] = tensor
    t = quantize(blocks, NVFP4)
    error = (t.dequantize(np.float64) - blocks)[:-1, :2]
    fmt = replace(NVFP4, name="blocks of 2", block_shape=(1, 2))
    expected = expected_error(np.append(x, -1e5), fmt, tensor_amax=1e5)
    assert (t.scales[:-1] == 0).any()  # scales that round to 0 are among them
    assert expected.noise == pytest.approx(np.square(error).mean(), rel=1e-6)  # FP32 rounds the scales
    scale = t.scale_values()[:-1] * float(t.tensor_scale)
    usable = scale[:, 0] > 0
    scaled = np.square(error[usable] / scale[usable]).sum() / error.size
    assert expected.scaled_noise == pytest.approx(scaled, rel=1e-6)


# -------------------------------------------------------------------------------------------------- double integrals
def normal_pdf(x):
    return math.exp(-x * x / 2) * math.sqrt(2 / math.pi)  # of |x|


def laplace_pdf(x):
    return math.exp(-x)


@pytest.mark.parametrize(
    "distribution, pdf, cdf, rule, bound",
    [
        (stats.norm(), normal_pdf, lambda m: math.erf(m / math.sqrt(2)), ScaleRule.FLOOR, 8),
        (stats.norm(), normal_pdf, lambda m: math.erf(m / math.sqrt(2)), ScaleRule.EVEN, 7),
        (stats.laplace(), laplace_pdf, lambda m: -math.expm1(-m), ScaleRule.RCEIL, 6),
        (stats.laplace(), laplace_pdf, lambda m: -math.expm1(-m), ScaleRule.CEIL, 4),
    ],
)
def test_it_is_the_integral_over_the_block_maximum_and_the_elements_below_it(distribution, pdf, cdf, rule, bound):
    """amax = m has the density 32 f F**31; given m, the other 31 are independent, with the density f / F(m)."""
    n = 32
    midpoints = [(a + b) / 2 for a, b in itertools.pairwise(E2M1_VALUES)]

    def squared_error(x, scale):
        return min((x - scale * value) ** 2 for value in E2M1_VALUES)

    def of_the_others(m, scale):
        edges = [0, *(scale * midpoint for midpoint in midpoints if scale * midpoint < m), m]
        pieces = (
            quad(lambda x: squared_error(x, scale) * pdf(x), a, b, epsrel=1e-9)[0] for a, b in itertools.pairwise(edges)
        )
        return sum(pieces) / cdf(m)

    total = 0.0
    for x in range(-5, 5):  # amax from bound / 64 to 16 * bound; beyond it lies less than 1e-9
        scale = 2.0**x

        def of_amax(m, scale=scale):
            error = squared_error(m, scale) + (n - 1) * of_the_others(m, scale)
            return pdf(m) * cdf(m) ** (n - 1) * error

        lower, upper = bound / 2 * scale, bound * scale
        breaks = [midpoint * scale for midpoint in midpoints if lower < midpoint * scale < upper]
        for a, b in itertools.pairwise([lower, *breaks, upper]):
            total += quad(of_amax, a, b, epsrel=1e-7)[0]
    assert expected_error(distribution, MXFP4, scale_rule=rule).noise == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize("fmt", [MXFP4, FP8_1X128], ids=lambda fmt: fmt.name)
def test_the_rungs_hold_all_of_the_variance(distribution, fmt):
    assert expected_error(distribution, fmt).signal == pytest.approx(distribution.var(), rel=1e-10)


def test_a_change_of_unit_by_a_power_of_two_changes_nothing():
    one, many = (expected_error(stats.norm(scale=scale), MXFP4) for scale in (1, 2.0**-60))
    assert one.sqnr_db == pytest.approx(many.sqnr_db, rel=1e-12)
    assert one.scaled_noise == pytest.approx(many.scaled_noise, rel=1e-12)


def test_reference_points_on_the_normal_distribution():
    sqnr_db = {rule.name: expected_error(stats.norm(), MXFP4, scale_rule=rule).sqnr_db for rule in RULES}
    assert sqnr_db == pytest.approx({"FLOOR": 18.79, "RCEIL": 18.76, "CEIL": 16.83, "EVEN": 19.03}, abs=0.01)


# ---------------------------------------------------------------------------------------------------------- measured
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_measured_and_expected_agree_within_sampling_error(name):
    source = DISTRIBUTIONS[name]
    x = independent_sample(source, (2000, 256), seed=5)
    cases = [(fmt, rule) for fmt in (MXFP4, MXFP8_E4M3, MXFP6_E2M3) for rule in RULES]
    rows = list(compare_with_theory(name, source, x, [*cases, (NVFP4, None), (FP8_1X128, None)]))
    has_variance = name != "Student t, 3"  # of the squared error
    assert len(rows) == 14 * (2 if has_variance else 1)
    assert {row.quantity for row in rows} == ({"plain", "scaled"} if has_variance else {"scaled"})
    for row in rows:
        assert row.standard_error_db < 0.15
        assert abs(row.num_standard_errors) < 4, row


def test_elements_drawn_from_a_tensor_agree_and_the_tensor_with_its_structure_does_not():
    random = np.random.default_rng(0)
    x = random.standard_normal((512, 256)) * np.exp2(random.integers(-3, 4, (512, 1)))  # tokens of different scale
    drawn = independent_sample(x, x.shape, seed=1)
    cases = [(MXFP4, ScaleRule.EVEN), (NVFP4, None)]
    for row in compare_with_theory("drawn", x, drawn, cases):
        assert abs(row.num_standard_errors) < 4
    in_place = [row for row in compare_with_theory("in place", x, x, cases) if row.quantity == "plain"]
    assert [row.num_standard_errors > 4 for row in in_place] == [True, False]
    assert [row.num_standard_errors < -4 for row in in_place] == [False, True]


def test_the_comparison_tells_the_rules_apart():
    x = independent_sample(stats.norm(), (2000, 256))
    for rule, other in itertools.permutations(RULES, 2):
        measured = measured_error(x, MXFP4, scale_rule=rule)
        wrong = expected_error(stats.norm(), MXFP4, scale_rule=other)
        if {rule, other} != {ScaleRule.FLOOR, ScaleRule.RCEIL}:  # 0.03 dB apart; the scaled SQNR tells them
            assert abs(measured.sqnr_db - wrong.sqnr_db) > 4 * measured.standard_error_db
        assert abs(measured.scaled_sqnr_db - wrong.scaled_sqnr_db) > 4 * measured.scaled_standard_error_db


def test_the_standard_error_is_that_of_repeated_measurements():
    x = independent_sample(stats.norm(), (200, 40, 32), seed=2)
    repeated = [measured_error(each, MXFP4) for each in x]
    for value, error in (("sqnr_db", "standard_error_db"), ("scaled_sqnr_db", "scaled_standard_error_db")):
        spread = np.std([getattr(m, value) for m in repeated], ddof=1)
        assert np.mean([getattr(m, error) for m in repeated]) == pytest.approx(spread, rel=0.15)


def test_measured_error_of_a_hand_computed_example():
    x = np.zeros((2, 32))
    x[0, 0], x[0, 1] = 4, 2.25  # scale 1: 2.25 becomes 2
    x[1, 0], x[1, 1] = 8, 1  # scale 2, exact
    m = measured_error(x, MXFP4)
    assert m.num_blocks == 2
    assert m.sqnr_db == pytest.approx(10 * math.log10((16 + 2.25**2 + 65) / 0.0625))
    assert m.scaled_sqnr_db == pytest.approx(10 * math.log10((16 + 2.25**2 + 65 / 4) / 0.0625))
    assert measured_error(np.ones((2, 32)), MXFP4).sqnr_db == math.inf


def test_of_nvfp4_the_blocks_that_hold_the_largest_magnitude_are_left_out():
    x = independent_sample(stats.norm(), (50, 16))
    x[7, 3], x[20, 0] = 10, -10
    measured = measured_error(x, NVFP4)
    error = quantize(x, NVFP4).dequantize(np.float64) - x
    others = np.setdiff1d(np.arange(50), [7, 20])
    assert measured.num_blocks == 48
    ratio = np.square(x[others]).sum() / np.square(error[others]).sum()
    assert measured.sqnr_db == pytest.approx(10 * math.log10(ratio))


# --------------------------------------------------------------------------------------------------------- bad input
NO_RULE = BlockFormat("no rule", MXFP4.element, (1, 32), MXFP4.scale, None)
X = np.ones((4, 32))


@pytest.mark.parametrize(
    "error, message, arguments, options",
    [
        (TypeError, "fmt is 'MXFP4', needed a BlockFormat", (X, "MXFP4"), {}),
        (TypeError, "scale_rule is 'floor', needed a ScaleRule", (X, MXFP4), {"scale_rule": "floor"}),
        (TypeError, "source has the dtype int64", (np.ones(5, np.int64), MXFP4), {}),
        (TypeError, "source has the dtype bool", (np.ones(5, bool), MXFP4), {}),
        (TypeError, "source has dtype", ("normal", MXFP4), {}),
        (ValueError, r"source has the shape \(0, 32\)", (np.ones((0, 32)), MXFP4), {}),
        (ValueError, "source holds 4 NaNs", (np.full(4, np.nan), MXFP4), {}),
        (ValueError, "source holds only zeros", (np.zeros(4), MXFP4), {}),
        (ValueError, "source has a standard deviation near 2", (X * 2.0**90, MXFP4), {}),
        (ValueError, "source has a standard deviation near 2", (X * 1e300, MXFP4), {}),
        (ValueError, "source has a standard deviation near 2", (X * 5e-324, MXFP4), {}),
        (ValueError, "source is not symmetric", (stats.norm(loc=0.1), MXFP4), {}),
        (ValueError, "source has the variance inf", (stats.t(2), MXFP4), {}),
        (ValueError, "fmt has INT8 elements", (X, MXINT8), {}),
        (ValueError, "no default rule", (X, NO_RULE), {}),
        (ValueError, "NVFP4 has none", (X, NVFP4), {"scale_rule": ScaleRule.FLOOR}),
        (ValueError, "tensor_amax is None, needed a finite number above 0", (X, NVFP4), {}),
        (ValueError, "tensor_amax is nan", (X, NVFP4), {"tensor_amax": math.nan}),
        (ValueError, "tensor_amax is 0.5, below all of source", (X, NVFP4), {"tensor_amax": 0.5}),
        (ValueError, "MXFP4 has no tensor scale", (X, MXFP4), {"tensor_amax": 1.0}),
    ],
)
def test_expected_error_refuses(error, message, arguments, options):
    with pytest.raises(error, match=f"^expected_error: .*{message}"):
        expected_error(*arguments, **options)


@pytest.mark.parametrize(
    "error, message, arguments, options",
    [
        (TypeError, "fmt is None, needed a BlockFormat", (X, None), {}),
        (TypeError, "x has the dtype int64", (X.astype(np.int64), MXFP4), {}),
        (ValueError, "needed whole blocks of 32 along the last axis", (X[:, :31], MXFP4), {}),
        (ValueError, "needed whole blocks", (X, FP8_128X128), {}),
        (ValueError, "x has 1 blocks to measure, needed at least 2", (X[:1], MXFP4), {}),
        (ValueError, "x holds 128 NaNs", (X * np.nan, MXFP4), {}),
        (ValueError, "x holds only zeros", (0 * X, MXFP4), {}),
        (ValueError, "x holds the magnitude 1e.300, needed 0 or 2", (X * 1e300, MXFP4), {}),
        (ValueError, "x holds the magnitude 5e-324", (X * 5e-324, MXFP4), {}),
        (ValueError, "x has the shape", (np.ones((0, 32)), MXFP4), {}),
        (ValueError, "NVFP4 has none", (X, NVFP4), {"scale_rule": ScaleRule.FLOOR}),
    ],
)
def test_measured_error_refuses(error, message, arguments, options):
    with pytest.raises(error, match=f"^measured_error: .*{message}"):
        measured_error(*arguments, **options)
