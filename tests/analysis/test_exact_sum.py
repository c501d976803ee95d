"""The sum is exact, so neither order nor grouping shows."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxsim.analysis.exact_sum import ExactSum


def exact_sum(groups: list[list[float]]) -> float:
    total = ExactSum()
    for group in groups:
        total.add(np.array(group, np.float64))
    return float(total)


def test_what_a_float64_sum_would_lose_is_kept():
    assert exact_sum([[1e300, 1.0], [-1e300, 2.0**-1074]]) == 1.0
    assert exact_sum([[0.1] * 10]) == 1.0  # ten times the float64 next to 0.1, rounded once


@given(st.lists(st.lists(st.floats(-1e100, 1e100))))
def test_the_result_is_the_rational_sum_rounded_once(groups):
    assert exact_sum(groups) == float(sum((Fraction(x) for group in groups for x in group), Fraction(0)))


@given(st.lists(st.floats(-1e100, 1e100)), st.integers(1, 5), st.randoms())
def test_grouping_and_order_do_not_show(terms, size, random):
    shuffled = random.sample(terms, len(terms))
    groups = [shuffled[i : i + size] for i in range(0, len(terms), size)]
    assert exact_sum(groups) == exact_sum([terms])


def test_merging_is_adding():
    parts = []
    for terms in ([1e100, 1.0], [-1e100, 1e-30]):
        part = ExactSum()
        part.add(np.array(terms))
        parts.append(part)
    parts[0].merge(parts[1])
    assert float(parts[0]) == 1.0


@pytest.mark.parametrize("terms", [[math.inf], [math.nan], [math.inf, -math.inf], [1e308, 1e308]])
def test_what_float64_cannot_hold_is_nan(terms):
    assert math.isnan(exact_sum([terms, [1.0]]))


def test_nothing_sums_to_zero():
    assert exact_sum([[]]) == 0.0
