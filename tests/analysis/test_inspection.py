"""Every code of the small formats, and numbers in between, against the sorted list of values."""

import bisect
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from mxsim.analysis.inspection import Kind, as_block_maximum, inspect_code, round_number
from mxsim.blocks import BLOCK_FORMATS, FP8_1X128, MXFP4, NVFP4, ScaleRule, quantize, scale_exponent
from mxsim.formats import E2M1, E4M3, E5M2, E8M0, FORMATS, FP16, FP32, INT8, Overflow, Rounding, decode, decode_table

SMALL = [fmt for fmt in FORMATS.values() if fmt.bits <= 16]


def ladder(fmt) -> list[float]:
    """All values in order, infinities included; -2 of INT8 is never produced and no neighbour of anything."""
    table = decode_table(fmt).astype(np.float64)
    if fmt is INT8:
        table = np.delete(table, 0x80)
    return sorted({float(v) + 0.0 for v in table if not np.isnan(v)})


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_every_code_taken_apart_gives_its_value_back(fmt):
    values = ladder(fmt)
    for code in range(0, fmt.num_codes, 1 if fmt.bits <= 8 else 149):
        c = inspect_code(code, fmt)
        value = float(decode(code, fmt))
        assert int("".join(c.fields), 2) == code
        assert len("".join(c.fields)) == fmt.bits
        if math.isnan(value):
            assert c.kind is Kind.NAN
            assert (c.below, c.above, c.ulp, c.significand) == (None, None, None, None)
            continue
        assert c.value == value
        if math.isfinite(value):
            assert Fraction(c.significand) * Fraction(2) ** c.exponent == Fraction(value)
        if (fmt, code) != (INT8, 0x80):
            place = values.index(value)
            assert c.below == (values[place - 1] if place else None)
            assert c.above == (values[place + 1] if place + 1 < len(values) else None)


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_the_ulp_is_the_distance_to_the_next_larger_magnitude(fmt):
    for code in range(0, fmt.max_code, 1 if fmt.bits <= 8 else 149):
        c = inspect_code(code, fmt)
        assert c.ulp == c.above - c.value


def test_kinds():
    assert [inspect_code(code, E5M2).kind.value for code in (0x80, 0x01, 0x7B, 0x7C, 0x7D)] == [
        "zero",
        "subnormal",
        "normal",
        "infinity",
        "NaN",
    ]
    assert inspect_code(0xFF, INT8).kind is Kind.FIXED_POINT
    assert inspect_code(0, E8M0).kind is Kind.NORMAL


def test_a_code_out_of_range_is_refused():
    for code in (-1, 16):
        with pytest.raises(ValueError, match="E2M1"):
            inspect_code(code, E2M1)


def numbers(fmt) -> list[float]:
    values = [v for v in ladder(fmt) if math.isfinite(v)]
    step = max(1, len(values) // 40)
    between = [a + (b - a) * share for a, b in pairwise(values) for share in (0.25, 0.5, 0.75)]
    beyond = [fmt.max_finite * 1.01, fmt.max_finite * 1.5, fmt.max_finite * 2.5, fmt.min_subnormal / 3, 0.0, -0.0]
    return [*values[::step], *between[:: max(1, len(between) // 60)], *beyond, *(-x for x in beyond)]


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_neighbours_of_a_number_are_the_values_beside_it(fmt):
    values = ladder(fmt)
    for x in numbers(fmt):
        r = round_number(x, fmt)
        if not fmt.signed and x < 0:
            assert math.isnan(r.nearest.value)
            continue
        left, right = bisect.bisect_left(values, x), bisect.bisect_right(values, x)
        assert r.below == (values[left - 1] if left else None), x
        assert r.above == (values[right] if right < len(values) else None), x
        assert r.error == Fraction(r.nearest.value) - Fraction(x)
        assert r.relative_error == (abs(r.error / Fraction(x)) if x else None)
        around = [v for v in values[max(left - 1, 0) : right + 1] if math.isfinite(v)]
        assert abs(r.error) == min(abs(Fraction(v) - Fraction(x)) for v in around)


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_roundings_take_the_neighbour_that_their_name_says(fmt):
    values = [v for v in ladder(fmt) if math.isfinite(v)]
    for x in numbers(fmt):
        if not values[0] <= x <= values[-1]:
            continue
        r = round_number(x, fmt)
        got = {rounding: by_overflow[Overflow.SATURATE] for rounding, by_overflow in r.outcomes.items()}
        exact = r.error == 0
        assert got[Rounding.DOWN] == (x if exact else r.below)
        assert got[Rounding.UP] == (x if exact else r.above)
        assert got[Rounding.TOWARD_ZERO] == (x if exact else min(r.below, r.above, key=abs))
        near, far = sorted([r.below, r.above], key=abs) if not exact else (x, x)
        share = Fraction(0) if exact else (Fraction(x) - Fraction(near)) / (Fraction(far) - Fraction(near))
        assert r.away_share == share
        if share != Fraction(1, 2):
            assert got[Rounding.TIES_TO_EVEN] == got[Rounding.TIES_TO_AWAY] == (far if share > Fraction(1, 2) else near)
        else:
            assert got[Rounding.TIES_TO_AWAY] == far


def test_overflow_of_e4m3():
    outcomes = round_number(460.0, E4M3).outcomes
    assert {r.outcomes[Rounding.TIES_TO_EVEN][Overflow.SATURATE] for r in (round_number(460.0, E4M3),)} == {448.0}
    assert outcomes[Rounding.TIES_TO_EVEN][Overflow.TO_NONFINITE] == 448
    assert math.isnan(outcomes[Rounding.UP][Overflow.TO_NONFINITE])
    assert round_number(460.0, E4M3).away_share == Fraction(12, 32)
    assert round_number(1e9, E4M3).away_share > 1
    assert round_number(7.0, E2M1).outcomes[Rounding.UP][Overflow.TO_NONFINITE] is None  # refused
    assert round_number(1e9, E5M2).above == math.inf


def test_what_has_no_code():
    assert round_number(math.nan, E2M1).nearest is None
    assert math.isnan(round_number(math.nan, E4M3).nearest.value)
    assert round_number(math.inf, FP16).nearest.value == 65504
    assert round_number(math.inf, FP16).error is None
    assert round_number(1e-60, E8M0).below is None
    assert round_number(1e-60, E8M0).away_share is None


@pytest.mark.parametrize("fmt", list(BLOCK_FORMATS.values()), ids=str)
def test_a_block_maximum_is_what_quantize_makes_of_it(fmt):
    for x in (7.0, -0.3, 1.75 * 2**-90, 3e38, -1e-40, 0.0):
        entries = as_block_maximum(x, fmt)
        rules = [rule for entry in entries for rule in entry.rules]
        assert sorted(rules, key=list(ScaleRule).index) == ([] if fmt is NVFP4 else list(ScaleRule))
        for entry in entries:
            for rule in entry.rules or (None,):
                t = quantize(np.full((1, 1), x), fmt, scale_rule=rule)
                assert entry.code == t.codes.item()
                assert entry.value == t.dequantize(np.float64).item()
                if rule and x:
                    assert entry.scale_exponent == scale_exponent(abs(x), fmt.element, rule)
                    assert entry.scaled == Fraction(x) / Fraction(2) ** entry.scale_exponent
                    assert entry.relative_error == abs((Fraction(entry.value) - Fraction(x)) / Fraction(x))


def test_a_nonfinite_maximum_poisons():
    for fmt in (MXFP4, NVFP4, FP8_1X128):
        (entry,) = as_block_maximum(math.nan, fmt)
        assert math.isnan(entry.scale)
        assert math.isnan(entry.value)
        assert (entry.scaled, entry.relative_error, entry.scale_exponent) == (None, None, None)


def test_fp32_codes_are_taken_apart_too():
    c = inspect_code(0x3DCCCCCD, FP32)
    assert c.fields == ("0", "01111011", "10011001100110011001101")
    assert (c.significand, c.exponent) == (13421773, -27)
    assert c.above == np.nextafter(np.float32(0.1), np.float32(1))
