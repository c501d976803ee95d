"""Text to numbers and back, against fractions."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxsim.commands.bad_input import BadInput, choose, printable
from mxsim.commands.number_text import (
    exact_decimal,
    looks_like_code,
    parse_code,
    parse_number,
    percent,
    short_hex,
    short_text,
)


@pytest.mark.parametrize(
    "text, value, is_exact",
    [
        ("1.5", 1.5, True),
        ("0.1", 0.1, False),
        (" -3e-4 ", -3e-4, False),
        ("+7", 7.0, True),
        ("1_000", 1000.0, True),
        ("1/3", 1 / 3, False),
        ("-3/4", -0.75, True),
        ("0x1.8p3", 12.0, True),
        ("-0x1.8", -1.5, True),
        ("0x1.00000000000001p0", 1.0, False),
        ("0x7e", 126.0, True),
        ("-0b11", -3.0, True),
        ("9007199254740993", 9007199254740992.0, False),
        ("1e400", math.inf, False),
        ("-1e400", -math.inf, False),
        ("1e-400", 0.0, False),
        ("1e999999999999", math.inf, False),
        ("inf", math.inf, True),
        ("-Infinity", -math.inf, True),
        ("-0", -0.0, True),
        ("5e-324", 5e-324, False),
    ],
)
def test_numbers(text, value, is_exact):
    number = parse_number(text)
    assert number.value == value
    assert math.copysign(1, number.value) == math.copysign(1, value)
    assert number.is_exact is is_exact


def test_nan():
    assert math.isnan(parse_number("nan").value)
    assert math.isnan(parse_number("-NaN").value)


@pytest.mark.parametrize(
    "text", ["", " ", "foo", "1/0", "1/", "/2", "0xzz", "1.2.3", "1e", "--1", "0x1p99999", "1/2/3", "1 2", "nan/2"]
)
def test_what_is_no_number(text):
    with pytest.raises(BadInput, match="neither a number"):
        parse_number(text)


def test_a_long_text_is_quoted_in_part():
    with pytest.raises(BadInput) as caught:
        parse_number("x" * 10_000)
    assert len(str(caught.value)) < 200


def test_codes():
    assert [parse_code(text) for text in ("0x7e", "0X7E", "0b111", "0o17", "126", " 5 ")] == [126, 126, 7, 15, 126, 5]
    for text in ("-1", "1.5", "foo", "0x1.8p3", ""):
        with pytest.raises(BadInput, match="not a code"):
            parse_code(text)


def test_a_prefix_makes_a_code_and_a_point_or_p_makes_a_number():
    assert all(looks_like_code(text) for text in ("0x7e", "0b1", "0O17"))
    assert not any(looks_like_code(text) for text in ("126", "0x1.8", "0x1p3", "-0x7e", "1e5", "0x", ""))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_has_all_its_digits(x):
    text = exact_decimal(x)
    assert Fraction(text) == Fraction(x)
    assert text.startswith("-") == (math.copysign(1, x) < 0)
    assert "e" not in text
    assert parse_number(text).is_exact


@given(st.floats(-1e300, 1e300), st.integers(9, 20))
def test_short_text_marks_what_it_rounds(x, width):
    text = short_text(x, width)
    if text.startswith("≈"):
        assert float(text[1:]) == pytest.approx(x, rel=0.01)
    elif "^" in text:
        sign, exponent = text.split("2^")
        assert x == (-1 if sign else 1) * 2.0 ** int(exponent)
    else:
        assert Fraction(text) == Fraction(x)
        assert len(text) <= width


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_short_hex_is_the_number(x):
    assert float.fromhex(short_hex(x)) == x


def test_short_text_of_what_is_no_number():
    assert [short_text(x) for x in (None, math.nan, math.inf, -math.inf)] == ["-", "nan", "inf", "-inf"]


def test_percent():
    assert [percent(x) for x in (0, 1, Fraction(1, 8), 1e-7, 1e-3, 25.5, 1e9, math.nan, None)] == [
        "0 %",
        "100 %",
        "12.5 %",
        "1e-05 %",
        "0.1 %",
        "2550 %",
        "1e+11 %",
        "-",
        "-",
    ]


def test_choosing_by_name():
    known = {"Alpha": 1, "Beta": 2}
    assert choose("letter", ["beta", "ALPHA", "Beta"], known) == [2, 1]
    with pytest.raises(BadInput, match=r"unknown letter 'alhpa'; did you mean Alpha\? \(known: Alpha, Beta\)"):
        choose("letter", ["alhpa"], known)


def test_printable_has_no_control_characters():
    assert printable("a\x1b[31m\nб") == "a\\x1b[31m\\nб"
