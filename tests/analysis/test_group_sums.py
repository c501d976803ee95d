"""Sums by group against Fractions, whatever the order and the cuts."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mxsim.analysis.group_sums import GroupSums, multiply

finite = st.floats(allow_nan=False, allow_infinity=False)


def by_hand(terms, groups, num_groups):
    sums = [Fraction(0)] * num_groups
    for term, group in zip(terms.tolist(), groups.tolist(), strict=True):
        sums[group] += Fraction(term)
    return sums


@given(arrays(np.float64, st.integers(0, 40), elements=finite), st.integers(0, 40), st.randoms())
def test_sums_are_exact_and_do_not_depend_on_order_or_cut(terms, cut, random):
    groups = np.array([random.randrange(3) for _ in terms], np.intp)
    want = by_hand(terms, groups, 3)
    order = np.array(random.sample(range(terms.size), terms.size), np.intp)
    whole, first, second = GroupSums(3), GroupSums(3), GroupSums(3)
    whole.add(terms, groups)
    first.add(terms[order][:cut], groups[order][:cut])
    second.add(terms[order][cut:], groups[order][cut:])
    first.merge(second)
    assert whole.fractions() == first.fractions() == want


def test_the_extremes_of_float64():
    terms = np.array([5e-324, 1.7976931348623157e308, -1.7976931348623157e308, 2.0**-1022, -0.0, 0.0])
    sums = GroupSums(1)
    sums.add(terms)
    assert sums.fractions() == [Fraction(5e-324) + Fraction(2.0**-1022)]
    assert sums.floats()[0] == 5e-324 + 2.0**-1022


def test_the_float_is_the_sum_rounded_once():
    sums = GroupSums(1)
    for term in (1.0, 2.0**-53, 2.0**-200):
        sums.add(np.array([term]))
    assert sums.floats()[0] == 1 + 2.0**-52


def test_nothing_sums_to_zero_and_nonfinite_is_refused():
    assert GroupSums(2).floats().tolist() == [0, 0]
    for bad in (np.inf, np.nan):
        with pytest.raises(ValueError, match="infinity or a NaN"):
            GroupSums(1).add(np.array([1.0, bad]))


@given(*[st.floats(-(2.0**200), 2.0**200).filter(lambda x: x == 0 or abs(x) > 2.0**-200)] * 2)
def test_a_product_is_its_two_parts(x, y):
    high, low = multiply(np.array([x]), np.array([y]))
    assert high[0] == x * y
    assert Fraction(high[0]) + Fraction(low[0]) == Fraction(x) * Fraction(y)
