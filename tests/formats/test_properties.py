"""Theorems about encode, decode and round_to, on arbitrary inputs (hypothesis)."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mxsim.formats import (
    FORMATS,
    FloatFormat,
    Overflow,
    Rounding,
    Specials,
    decode,
    encode,
    pack,
    philox_bits,
    round_to,
    unpack,
)
from tests import oracle
from tests.compare import assert_codes_equal, float_bits
from tests.oracle import Spec

DETERMINISTIC = [Rounding[name] for name in oracle.DETERMINISTIC_ROUNDINGS]
SIGNED = [fmt for fmt in FORMATS.values() if fmt.signed]
FLOATS = [fmt for fmt in SIGNED if fmt.name != "INT8"]

FEW = settings(max_examples=40)  # for each format

reals = st.one_of(
    st.floats(allow_nan=False),
    st.floats(allow_nan=False, width=32),
    st.floats(-1000, 1000),
    st.floats(-8, 8, width=32),
)
finite_reals = reals.filter(np.isfinite)


@st.composite
def formats(draw) -> tuple[FloatFormat, Spec]:
    """Any small format: exponent and mantissa bits, bias, special values, sign, subnormals."""
    exponent_bits, mantissa_bits = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    bias = draw(st.integers(-3, 40))
    signed = draw(st.booleans())
    specials = draw(st.sampled_from([s.name for s in Specials]))
    if specials == "INF_AND_NAN":
        assume(signed and mantissa_bits > 0)
    if specials == "NAN_IS_NEGATIVE_ZERO":
        assume(signed)
    subnormals = draw(st.booleans())
    fields = (exponent_bits, mantissa_bits, bias, specials, signed, subnormals)
    num_magnitudes = 2 ** (exponent_bits + mantissa_bits)
    nan = {
        "NONE": None,
        "NAN_ALL_ONES": num_magnitudes - 1,
        "NAN_IS_NEGATIVE_ZERO": num_magnitudes,
        "INF_AND_NAN": num_magnitudes - 2**mantissa_bits + 2 ** max(mantissa_bits - 1, 0),
    }[specials]
    spec = Spec("ANY", *fields, nan=nan)
    assume(oracle.max_finite(spec) > 0)
    fmt = FloatFormat(
        "ANY", exponent_bits, mantissa_bits, bias, Specials[specials], signed=signed, has_subnormals=subnormals
    )
    return fmt, spec


@given(formats(), st.lists(reals, min_size=1, max_size=20), st.data())
def test_any_format_is_the_oracles(pair, values, data):
    fmt, spec = pair
    scale = float(oracle.min_normal(spec)) * 2.0 ** data.draw(st.integers(-4, 12))
    values = values + [float(v) * scale for v in data.draw(st.lists(st.floats(-16, 16), max_size=20))]
    if spec.nan is None and not spec.signed:
        values = [abs(v) for v in values if np.isfinite(v)]
    for rounding in DETERMINISTIC:
        want = [oracle.encode(v, spec, rounding.name) for v in values]
        x = np.array(values, np.float64)
        assert_codes_equal(encode(x, fmt, rounding=rounding), np.array(want, np.int64), x, f"{spec} {rounding.name}")
        if fmt.has_nan:
            want = [oracle.encode(v, spec, rounding.name, "TO_NONFINITE") for v in values]
            got = encode(x, fmt, rounding=rounding, overflow=Overflow.TO_NONFINITE)
            assert_codes_equal(got, np.array(want, np.int64), x, f"{spec} {rounding.name} TO_NONFINITE")


@given(formats())
def test_any_format_decodes_and_encodes_every_code(pair):
    fmt, spec = pair
    codes = np.arange(fmt.num_codes)
    values = decode(codes, fmt)
    numbers = [oracle.decode(c, spec) for c in range(fmt.num_codes)]
    for value, n in zip(values.tolist(), numbers, strict=True):
        got = oracle.number(value)
        assert (got.kind, got.magnitude) == (n.kind, n.magnitude)
        assert got.negative == n.negative or n.kind == "nan"
    keep = np.isfinite(values)
    assert_codes_equal(encode(values[keep], fmt), codes[keep], values[keep], str(spec))


@pytest.mark.parametrize("fmt", SIGNED, ids=str)
class TestEveryFormat:
    @FEW
    @given(x=reals, rounding=st.sampled_from(DETERMINISTIC))
    def test_rounding_twice_is_rounding_once(self, fmt, x, rounding):
        once = round_to(x, fmt, rounding=rounding)
        again = round_to(once, fmt, rounding=rounding)
        assert float_bits(once) == float_bits(again)

    @FEW
    @given(x=reals, seed=st.integers(0, 2**64 - 1))
    def test_a_rounded_value_never_moves_again(self, fmt, x, seed):
        once = round_to(x, fmt, rounding=Rounding.STOCHASTIC, random_bits=philox_bits(seed, ()))
        for rounding in DETERMINISTIC:
            assert float_bits(round_to(once, fmt, rounding=rounding)) == float_bits(once)

    @FEW
    @given(x=reals)
    def test_negation_mirrors_every_rounding(self, fmt, x):
        mirror = {Rounding.UP: Rounding.DOWN, Rounding.DOWN: Rounding.UP}
        for rounding in DETERMINISTIC:
            plus, minus = (
                round_to(x, fmt, rounding=rounding),
                round_to(-x, fmt, rounding=mirror.get(rounding, rounding)),
            )
            assert plus == -minus
            if fmt.name != "INT8":  # two's complement has no -0
                assert np.signbit(plus) != np.signbit(minus)

    @FEW
    @given(x=reals, y=reals, rounding=st.sampled_from(DETERMINISTIC))
    def test_rounding_keeps_order(self, fmt, x, y, rounding):
        low, high = min(x, y), max(x, y)
        assert round_to(low, fmt, rounding=rounding) <= round_to(high, fmt, rounding=rounding)

    @FEW
    @given(x=finite_reals)
    def test_directed_roundings_enclose_the_value(self, fmt, x):
        x = float(np.clip(x, -fmt.max_finite, fmt.max_finite))
        directed = (Rounding.DOWN, Rounding.UP, Rounding.TOWARD_ZERO)
        down, up, toward_zero = (float(round_to(x, fmt, rounding=r)) for r in directed)
        assert down <= x <= up
        assert toward_zero == (down if x >= 0 else up)
        for rounding in (Rounding.TIES_TO_EVEN, Rounding.TIES_TO_AWAY):
            nearest = float(round_to(x, fmt, rounding=rounding))
            assert nearest in (down, up)
            # in Fractions: the differences of float64 may need more than 53 bits
            assert abs(Fraction(nearest) - Fraction(x)) == min(Fraction(x) - Fraction(down), Fraction(up) - Fraction(x))

    @FEW
    @given(x=finite_reals)
    def test_nothing_representable_lies_closer(self, fmt, x):
        if fmt.bits > 16:
            return
        x = float(np.clip(x, -fmt.max_finite, fmt.max_finite))
        values = decode(np.arange(fmt.num_codes), fmt)
        distance = np.abs(values[np.isfinite(values)].astype(np.float64) - x)
        assert abs(float(round_to(x, fmt)) - x) == distance.min()

    @FEW
    @given(x=st.floats(1, 2, exclude_max=True), exponents=st.tuples(st.integers(0, 254), st.integers(0, 254)))
    def test_normal_values_scale_by_powers_of_two(self, fmt, x, exponents):
        if fmt.name == "INT8":
            return  # one normal binade only
        span = fmt.emax - fmt.emin  # the top binade may overflow
        e, f = (fmt.emin + n % span for n in exponents)
        for rounding in DETERMINISTIC:
            for sign in (1.0, -1.0):
                at_e = float(round_to(sign * x * 2.0**e, fmt, rounding=rounding))
                at_f = float(round_to(sign * x * 2.0**f, fmt, rounding=rounding))
                if fmt.mantissa_bits or rounding is not Rounding.TIES_TO_EVEN:
                    assert at_e * 2.0 ** (f - e) == at_f

    @FEW
    @given(data=st.data())
    def test_codes_survive_decoding_and_packing(self, fmt, data):
        codes = np.array(data.draw(st.lists(st.integers(0, fmt.num_codes - 1), max_size=40)), fmt.code_dtype)
        values = decode(codes, fmt)
        keep = np.isfinite(values)
        if fmt.name == "INT8":
            keep &= codes != 0x80
        assert_codes_equal(encode(values[keep], fmt), codes[keep], values[keep])
        if fmt.bits <= 8:
            assert_codes_equal(unpack(pack(codes, fmt), fmt, codes.size), codes)

    @FEW
    @given(x=st.lists(reals, max_size=30), seed=st.integers(0, 2**64 - 1))
    def test_a_draw_lands_on_a_neighbour(self, fmt, x, seed):
        x = np.array(x, np.float64)
        drawn = round_to(x, fmt, rounding=Rounding.STOCHASTIC, random_bits=philox_bits(seed, x.shape))
        down, up = (round_to(x, fmt, rounding=r) for r in (Rounding.DOWN, Rounding.UP))
        assert np.all((drawn == down) | (drawn == up))

    @FEW
    @given(x=st.lists(reals, max_size=30))
    def test_arrays_are_their_elements(self, fmt, x):
        whole = encode(np.array(x, np.float64), fmt)
        assert whole.tolist() == [int(encode(v, fmt)) for v in x]


@given(x=st.lists(st.floats(width=32), max_size=30))
@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.has_nan], ids=str)
def test_float32_and_float64_of_the_same_value_agree(fmt, x):
    wide = np.array(x, np.float64)
    with np.errstate(invalid="ignore"):
        narrow = wide.astype(np.float32)
    for rounding in DETERMINISTIC:
        assert_codes_equal(encode(narrow, fmt, rounding=rounding), encode(wide, fmt, rounding=rounding), narrow)
