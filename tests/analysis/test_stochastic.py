"""Moments against choices made by hand and drawn; bias, variance and growth where they are known."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from mxsim.analysis.accumulation import Distribution, sample
from mxsim.analysis.stochastic import (
    FIRST_SEED,
    ROUNDINGS,
    Quantity,
    StochasticRow,
    dot_errors,
    element_errors,
    error_moments,
    growth_exponent,
    tensor_errors,
)
from mxsim.blocks import FP8_1X128, FP8_128X128, MXFP4, NVFP4, ScaleRule, quantize
from mxsim.formats import Rounding, philox_bits

NEAREST, STOCHASTIC = Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC
E2M1_VALUES = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
NORMAL = sample(Distribution.NORMAL, (64, 256))


def by_quantity(rows) -> dict[tuple[Rounding, Quantity], StochasticRow]:
    rows = list(rows)
    table = {(row.rounding, row.quantity): row for row in rows}
    assert len(table) == len(rows)
    return table


def of_magnitude(y: Fraction, rounding: Rounding) -> tuple[Fraction, Fraction]:
    """(mean, variance) of the error of one E2M1 magnitude, from the list of its values."""
    if y >= 6:
        return 6 - y, Fraction(0)
    low, high = next((a, b) for a, b in pairwise(E2M1_VALUES) if a <= y < b)
    frac = (y - low) / (high - low)
    if rounding is NEAREST:
        low_is_even = E2M1_VALUES.index(low) % 2 == 0
        return (low if frac < Fraction(1, 2) or (frac == Fraction(1, 2) and low_is_even) else high) - y, Fraction(0)
    return Fraction(0), frac * (high - y) ** 2 + (1 - frac) * (low - y) ** 2


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("exponent", [0, -7, 90])
def test_moments_of_single_elements(rounding, exponent):
    y = [Fraction(n, 16) for n in range(124)]
    x = np.array([float(v) for v in y] + [7.75] * 4).reshape(4, 32) * 2.0**exponent
    x[:, 0] = 7.75 * 2.0**exponent  # the scale of every block is 2**exponent
    x[1::2] *= -1
    got = error_moments(x, MXFP4, rounding=rounding)
    want = [of_magnitude(Fraction(float(abs(v))) / Fraction(2) ** exponent, rounding) for v in x.ravel()]
    means = np.array([float(mean) for mean, _ in want]).reshape(x.shape) * np.sign(x)
    np.testing.assert_array_equal(got.mean, means * 2.0**exponent)
    np.testing.assert_array_equal(got.variance, np.reshape([float(v) for _, v in want], x.shape) * 4.0**exponent)
    np.testing.assert_array_equal(got.saturated, abs(x) > 6 * 2.0**exponent)


def test_moments_to_nearest_are_the_errors():
    for fmt in (MXFP4, FP8_1X128):
        got = error_moments(NORMAL, fmt, rounding=NEAREST).mean
        np.testing.assert_array_equal(got, quantize(NORMAL, fmt).dequantize(np.float64) - NORMAL)


@pytest.mark.parametrize("fmt", [MXFP4, FP8_1X128], ids=str)
def test_drawn_moments_are_the_theorys(fmt):
    """Of each element, over 2000 seeds; the largest of 512 deviations is below 5 standard errors."""
    x = NORMAL[:2]
    num_seeds = 2000
    bits = philox_bits(FIRST_SEED, (num_seeds, *x.shape))
    many = np.broadcast_to(x, bits.shape)
    errors = quantize(many, fmt, rounding=STOCHASTIC, random_bits=bits).dequantize(np.float64) - x
    theory = error_moments(x, fmt, rounding=STOCHASTIC)
    random = theory.variance > 0
    z = (errors.mean(axis=0) - theory.mean)[random] / np.sqrt(theory.variance[random] / num_seeds)
    assert random.sum() > 400
    assert abs(z).max() < 5
    assert (errors[:, ~random] == theory.mean[~random]).all()
    ratio = errors.var(axis=0, ddof=1)[random].sum() / theory.variance.sum()
    assert ratio == pytest.approx(1, abs=0.02)


def test_variance_is_at_most_a_quarter_of_the_gap_and_the_fourth_cumulant_a_choices():
    moments = error_moments(np.array([[2.5, 2.75, 4.0] + [7.0] * 29]), MXFP4, rounding=STOCHASTIC)
    assert moments.variance[0, :3].tolist() == [0.25, 3 / 16, 0]
    # of a fair choice between +-1/2: E x**4 - 3 (E x**2)**2 = 1/16 - 3/16
    assert moments.fourth_cumulant[0, :3].tolist() == [-1 / 8, 3 / 16 * (1 - 18 / 16), 0]


# ------------------------------------------------------------------------------------------------------------ elements
def test_an_element_is_unbiased_but_where_it_saturates():
    y = [0.0, 0.1, 0.25, 1.3, 2.9, 4.99, 5.0, 6.0, 6.5, 7.9]
    rows = list(element_errors(y, num_draws=3100))
    biases = [row for row in rows if row.quantity is Quantity.ELEMENT_BIAS]
    assert [row.at for row in biases] == y
    for row in biases[:7]:
        assert abs(row.value) <= 4 * row.standard_error
    assert [row.value for row in biases[7:]] == [0, -0.5, -1.9]
    noise = [row for row in rows if row.quantity is Quantity.ELEMENT_NOISE]
    for row, exact in zip(noise, map(Fraction, y), strict=True):
        mean, variance = of_magnitude(exact, STOCHASTIC)
        assert row.value == pytest.approx(float(mean**2 + variance), abs=4 * row.standard_error + 1e-5)


def test_to_nearest_an_element_errs_always_alike():
    rows = [row for row in element_errors([2.5, 4.99], rounding=NEAREST) if row.quantity is Quantity.ELEMENT_BIAS]
    assert [(row.value, row.standard_error) for row in rows] == [(-0.5, 0), (-0.99, 0)]


# ------------------------------------------------------------------------------------------------------------- tensors
@pytest.mark.parametrize("rule", [ScaleRule.FLOOR, ScaleRule.RCEIL])
def test_a_tensors_bias_comes_from_saturation_alone(rule):
    table = by_quantity(tensor_errors("normal", NORMAL, MXFP4, scale_rule=rule, num_seeds=32))
    assert {row.scale_rule for row in table.values()} == {rule.name}
    bias, unsaturated = table[STOCHASTIC, Quantity.BIAS], table[STOCHASTIC, Quantity.UNSATURATED_BIAS]
    assert abs(unsaturated.value) < 4 * unsaturated.standard_error
    assert (bias.value < -10 * bias.standard_error) == (rule is ScaleRule.FLOOR)
    assert (table[STOCHASTIC, Quantity.SATURATED].value > 0.02) == (rule is ScaleRule.FLOOR)
    assert table[NEAREST, Quantity.BIAS].value < -0.01
    for quantity in (Quantity.BIAS_RATIO, Quantity.VARIANCE_RATIO):
        row = table[STOCHASTIC, quantity]
        assert abs(row.value - 1) < 4 * row.standard_error
        assert row.standard_error < 0.05


def test_stochastic_rounding_costs_3_db_where_nothing_saturates():
    table = by_quantity(tensor_errors("normal", NORMAL, FP8_1X128, num_seeds=8))
    cost = table[NEAREST, Quantity.SQNR_DB].value - table[STOCHASTIC, Quantity.SQNR_DB].value
    assert cost == pytest.approx(10 * np.log10(2), abs=0.1)


def test_a_tensor_of_representable_values_has_no_error():
    table = by_quantity(tensor_errors("exact", np.array([[4.0, 0.5, -3.0, 6.0]]), MXFP4, num_seeds=2))
    assert table[STOCHASTIC, Quantity.SQNR_DB].value == table[NEAREST, Quantity.SQNR_DB].value == np.inf
    assert table[STOCHASTIC, Quantity.BIAS].value == 0
    assert (STOCHASTIC, Quantity.VARIANCE_RATIO) not in table


# -------------------------------------------------------------------------------------------------------- dot products
def test_bias_grows_with_k_and_scatter_with_its_root():
    ks, shape = [32, 128, 512, 2048], (48, 2048)
    a = np.full(shape, 2.484375)
    rows = list(dot_errors("tie", a, np.ones(shape), num_products=ks, scale_rule=ScaleRule.RCEIL))
    nearest, drawn = ([row for row in rows if row.rounding is r] for r in ROUNDINGS)
    per_product = (2.484375 - 2) / 2.484375
    assert [row.value for row in nearest] == pytest.approx([k * per_product for k in ks], rel=1e-5)
    assert growth_exponent(nearest) == pytest.approx(1, abs=1e-5)
    assert growth_exponent(drawn) == pytest.approx(0.5, abs=0.08)
    frac = 2.484375 / 2 * 2 - 2  # between 2 and 3 by scale 1/2: 4.96875 lies between 4 and 6
    deviation = np.sqrt(frac * (1 - frac)) / 2.484375
    for row in drawn:
        assert row.value == pytest.approx(deviation * row.at**0.5, abs=4 * row.standard_error)


def test_rounding_by_the_bits_that_made_the_data_is_biased():
    """The reason for FIRST_SEED."""
    a = sample(Distribution.POSITIVE_NORMAL, (64, 1024))
    of = {}
    for seed in (0, FIRST_SEED):
        (row,) = (
            row
            for row in dot_errors("", a, np.ones(a.shape), num_products=[1024], scale_rule=ScaleRule.RCEIL, seed=seed)
            if row.rounding is STOCHASTIC
        )
        of[seed] = row.value
    assert of[0] > 2 * of[FIRST_SEED]


def test_what_is_relative_to_unsaturated_elements_is_left_out_where_there_are_none():
    rows = list(tensor_errors("", np.full((2, 32), 7.0), MXFP4, scale_rule=ScaleRule.FLOOR, num_seeds=2))
    assert {row.quantity for row in rows} == {Quantity.SQNR_DB, Quantity.BIAS, Quantity.SATURATED}
    assert {row.value for row in rows if row.quantity is Quantity.BIAS} == {-0.142857}


# -------------------------------------------------------------------------------------------------------------- refused
X = np.ones((2, 32))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: error_moments(X, NVFP4, rounding=NEAREST), ValueError, "error_moments: fmt is NVFP4, needed one with"),
        (lambda: error_moments(X, FP8_128X128, rounding=NEAREST), ValueError, "fmt is FP8_128X128, needed"),
        (lambda: error_moments(X, "MXFP4", rounding=NEAREST), TypeError, "fmt is 'MXFP4', needed a BlockFormat"),
        (lambda: error_moments(X, MXFP4, rounding=Rounding.UP), ValueError, "needed TIES_TO_EVEN or STOCHASTIC"),
        (lambda: error_moments(X * np.nan, MXFP4, rounding=NEAREST), ValueError, "x holds a NaN or an infinity"),
        (lambda: error_moments(X[:, :0], MXFP4, rounding=NEAREST), ValueError, "needed at least one element"),
        (
            lambda: error_moments(X.astype(int), MXFP4, rounding=NEAREST),
            TypeError,
            "x has the dtype int64, needed float",
        ),
        (lambda: error_moments(X * 2.0**200, MXFP4, rounding=NEAREST), ValueError, "x holds the magnitude 1.606"),
        (lambda: list(tensor_errors("", X * 5e-324, MXFP4)), ValueError, "tensor_errors: x holds the magnitude 5e-324"),
        (lambda: list(dot_errors("", X, 0 * X, num_products=[1])), ValueError, "every product of a and b is 0"),
        (lambda: error_moments(X.astype(str), MXFP4, rounding=NEAREST), TypeError, "error_moments: x"),
        (lambda: list(tensor_errors("", X, MXFP4, num_seeds=1)), ValueError, "num_seeds is 1, needed 2 or more"),
        (lambda: list(tensor_errors("", X * 0, MXFP4)), ValueError, "x holds nothing but zeros"),
        (lambda: list(element_errors([8.0])), ValueError, "needed one or more numbers of 0 to 8"),
        (lambda: list(element_errors([])), ValueError, "needed one or more numbers of 0 to 8"),
        (lambda: list(element_errors([np.nan])), ValueError, "needed one or more numbers of 0 to 8"),
        (lambda: list(element_errors([1.0], num_draws=1)), ValueError, "num_draws is 1, needed 2 or more"),
        (lambda: list(dot_errors("", X, X[:1], num_products=[1])), ValueError, r"shapes \(2, 32\) and \(1, 32\)"),
        (lambda: list(dot_errors("", X, X, num_products=[33])), ValueError, r"num_products is \[33\], needed"),
        (lambda: list(dot_errors("", X, X, num_products=[])), ValueError, r"num_products is \[\], needed"),
        (lambda: growth_exponent([]), ValueError, "two values of K"),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
