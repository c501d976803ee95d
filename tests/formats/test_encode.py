"""encode with the deterministic roundings: every tie and its neighbours, every BF16 and FP16 input."""

from functools import cache

import numpy as np
import pytest

from mxsim.formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    FP16,
    FP32,
    INT8,
    FloatFormat,
    Overflow,
    Rounding,
    decode,
    encode,
    round_to,
)
from tests import oracle
from tests.compare import assert_codes_equal, assert_floats_equal
from tests.formats.pairs import CATALOG, NARROW, TABLED, USER, as_float64, modes, name_of
from tests.formats.points import boundaries, encodable, points32, points64
from tests.formats.table_codec import encode_by_table

INF, NAN = np.inf, np.nan
SATURATE, TO_NONFINITE = Overflow.SATURATE, Overflow.TO_NONFINITE


# ------------------------------------------------------------------------------------------------- by hand, per format
def test_E2M1_ties_go_to_the_even_code():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert encode(ties, E2M1).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode(-ties, E2M1).tolist() == [8, 10, 10, 12, 12, 14, 14]
    assert encode(ties, E2M1, rounding=Rounding.TIES_TO_AWAY).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert encode(ties, E2M1, rounding=Rounding.TOWARD_ZERO).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert encode(ties, E2M1, rounding=Rounding.UP).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert encode(-ties, E2M1, rounding=Rounding.UP).tolist() == [8, 9, 10, 11, 12, 13, 14]
    assert encode(ties, E2M1, rounding=Rounding.DOWN).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert encode(-ties, E2M1, rounding=Rounding.DOWN).tolist() == [9, 10, 11, 12, 13, 14, 15]


def test_E4M3_overflow():
    x = [448, 464, 465, np.nextafter(464, 465), -464, -465, 1e30, INF, -INF]
    assert encode(x, E4M3).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7E, 0x7E, 0xFE]
    want = [0x7E, 0x7E, 0x7F, 0x7F, 0xFE, 0xFF, 0x7F, 0x7F, 0xFF]
    assert encode(x, E4M3, overflow=TO_NONFINITE).tolist() == want
    away = encode([463, 464], E4M3, overflow=TO_NONFINITE, rounding=Rounding.TIES_TO_AWAY)
    assert away.tolist() == [0x7E, 0x7F]


def test_a_rounding_toward_zero_overflows_to_the_largest_finite():
    x = [479, 480, 1e30, -479, -480, -1e30]
    toward_zero = encode(x, E4M3, overflow=TO_NONFINITE, rounding=Rounding.TOWARD_ZERO)
    assert toward_zero.tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0xFE]
    up = encode(x, E5M2, overflow=TO_NONFINITE, rounding=Rounding.UP)
    assert up.tolist() == [0x60, 0x60, 0x7C, 0xDF, 0xDF, 0xFB]
    down = encode(x, E4M3, overflow=TO_NONFINITE, rounding=Rounding.DOWN)
    assert down.tolist() == [0x7E, 0x7E, 0x7E, 0xFF, 0xFF, 0xFF]


def test_E5M2_infinity_and_NaN():
    x = [57344, 61439, 61440, INF, -INF, NAN, -NAN]
    assert encode(x, E5M2).tolist() == [0x7B, 0x7B, 0x7B, 0x7B, 0xFB, 0x7F, 0xFF]
    assert encode(x, E5M2, overflow=TO_NONFINITE).tolist() == [0x7B, 0x7B, 0x7C, 0x7C, 0xFC, 0x7F, 0xFF]
    for rounding in (Rounding.TOWARD_ZERO, Rounding.DOWN, Rounding.UP):  # infinity is exact, not an overflow
        assert encode([INF, -INF], E5M2, overflow=TO_NONFINITE, rounding=rounding).tolist() == [0x7C, 0xFC]


def test_E8M0_ties_zero_and_negatives():
    x = [1, 2, 3, 6, 12, 0.75, 1.5, 0.0, -0.0, 2.0**-127, 2.0**-149, -1, -1e-300, INF, -INF, NAN, -NAN]
    want = [127, 128, 128, 130, 130, 126, 128, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255]
    assert encode(x, E8M0).tolist() == want
    assert encode(x, E8M0, overflow=TO_NONFINITE).tolist() == want
    beyond = [2.0**127, 1.5 * 2.0**127, 1.51 * 2.0**127, 2.0**128, 1e300]
    assert encode(beyond, E8M0).tolist() == [254] * 5
    assert encode(beyond, E8M0, overflow=TO_NONFINITE).tolist() == [254, 254, 255, 255, 255]
    assert encode([3, 4.5, 1e-45], E8M0, rounding=Rounding.UP).tolist() == [129, 130, 0]
    assert encode([3, 4.5, 1e-45], E8M0, rounding=Rounding.DOWN).tolist() == [128, 129, 0]


def test_INT8_is_symmetric_and_never_0x80():
    x = np.array([0.0, -0.0, 1, -1, 127 / 64, -127 / 64, -2, 5, -INF, 1 / 128, 3 / 128, -1 / 128])
    want = [0, 0, 0x40, 0xC0, 0x7F, 0x81, 0x81, 0x7F, 0x81, 0, 2, 0]
    assert encode(x, INT8).tolist() == want
    for rounding, _ in modes(oracle.INT8):
        assert 0x80 not in encode(np.linspace(-3, 3, 9999), INT8, rounding=rounding)


def test_the_sign_of_zero_and_of_underflow_is_kept():
    x = [0.0, -0.0, 1e-300, -1e-300, 2.0**-10, -(2.0**-10)]
    assert encode(x, E4M3).tolist() == [0, 0x80, 0, 0x80, 0, 0x80]
    assert encode(x, E2M1).tolist() == [0, 8, 0, 8, 0, 8]
    assert encode(x, E4M3, rounding=Rounding.UP).tolist() == [0, 0x80, 1, 0x80, 1, 0x80]
    assert encode(x, E4M3, rounding=Rounding.DOWN).tolist() == [0, 0x80, 0, 0x81, 0, 0x81]


def test_NaN_keeps_its_sign():
    for dtype in (np.float16, np.float32, np.float64):
        x = np.array([NAN, -NAN], dtype)
        for rounding, overflow in modes(oracle.E4M3):
            assert encode(x, E4M3, rounding=rounding, overflow=overflow).tolist() == [0x7F, 0xFF]
            assert encode(x, BF16, rounding=rounding, overflow=overflow).tolist() == [0x7FC0, 0xFFC0]
    payloads = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFBFFFFF], np.uint32).view(np.float32)
    assert encode(payloads, E4M3).tolist() == [0x7F, 0xFF, 0x7F, 0xFF]
    assert encode(payloads, E5M2).tolist() == [0x7F, 0xFF, 0x7F, 0xFF]
    assert encode(payloads, E8M0).tolist() == [0xFF] * 4


@pytest.mark.parametrize(
    "bits, dtype", [(0x7C01, np.float16), (0x7F800001, np.float32), (0x7FF0000000000001, np.float64)]
)
@pytest.mark.parametrize("rounding", [Rounding.TIES_TO_EVEN, Rounding.UP])
def test_a_signalling_NaN_is_a_NaN_and_warns_of_nothing(bits, dtype, rounding):
    x = np.array([bits], f"u{np.dtype(dtype).itemsize}").view(dtype)
    for fmt in (E4M3, E5M2, E8M0, BF16, FP32):
        assert encode(x, fmt, rounding=rounding).tolist() == [fmt.nan_code]


def test_one_rounding_not_two():
    # 1.0625 is a tie of E4M3; a detour through FP16 or BF16 would drop what lies beyond it
    x = np.array([0x3F87FFFF, 0x3F880000, 0x3F880001], np.uint32).view(np.float32)
    assert encode(x, E4M3).tolist() == [0x38, 0x38, 0x39]
    assert encode([np.nextafter(1.0625, 0), 1.0625, np.nextafter(1.0625, 2)], E4M3).tolist() == [0x38, 0x38, 0x39]
    assert encode(np.nextafter(2.0**-10, 1), E4M3) == 1
    assert encode(1 + 2.0**-24 + 2.0**-50, FP32) == 0x3F800001


# ----------------------------------------------------------------------------------- every boundary and its neighbours
@cache
def expected_by_fractions(spec, rounding: str, overflow: str) -> np.ndarray:
    numbers = [oracle.number(float(v)) for v in encodable(points64(spec), spec)]
    return np.array([oracle.encode(n, spec, rounding, overflow) for n in numbers])


@pytest.mark.parametrize("pair", NARROW, ids=name_of)
def test_every_boundary_and_its_float64_neighbours_against_the_fractions(pair):
    fmt, spec = pair
    x = encodable(points64(spec), spec)
    for rounding, overflow in modes(spec):
        want = expected_by_fractions(spec, rounding.name, overflow.name)
        got = encode(x, fmt, rounding=rounding, overflow=overflow)
        assert got.dtype == fmt.code_dtype
        assert_codes_equal(got, want, x, f"{fmt} {rounding.name} {overflow.name}")


@pytest.mark.parametrize("pair", NARROW, ids=name_of)
def test_every_boundary_and_its_float32_neighbours(pair):
    fmt, spec = pair
    x = encodable(points32(spec), spec)
    numbers = [oracle.number(float(v)) for v in x]
    for rounding, overflow in modes(spec):
        if pair in CATALOG:
            want = np.array([oracle.encode(n, spec, rounding.name, overflow.name) for n in numbers])
        else:
            want = encode_by_table(x, spec, rounding.name, overflow.name)
        got = encode(x, fmt, rounding=rounding, overflow=overflow)
        assert_codes_equal(got, want, x, f"{fmt} {rounding.name} {overflow.name}")


@pytest.mark.parametrize("pair", [p for p in CATALOG if p[1].bits == 16], ids=name_of)
@pytest.mark.parametrize("points", [points64, points32], ids=["float64", "float32"])
def test_every_boundary_of_a_16_bit_format_against_the_table(pair, points):
    fmt, spec = pair
    x = points(spec)
    for rounding, overflow in modes(spec):
        want = encode_by_table(x, spec, rounding.name, overflow.name)
        got = encode(x, fmt, rounding=rounding, overflow=overflow)
        assert_codes_equal(got, want, x, f"{fmt} {rounding.name} {overflow.name}")


@pytest.mark.parametrize("mantissa_bits", [0, 1, 5, 6])
@pytest.mark.parametrize("min_subnormal_exponent", [-149, -134, -133, -132, -131, -130, -129, -126])
def test_formats_among_the_subnormals_of_float32(mantissa_bits, min_subnormal_exponent):
    bias = 1 - mantissa_bits - min_subnormal_exponent
    fmt, spec = FloatFormat("LOW", 2, mantissa_bits, bias), oracle.Spec("LOW", 2, mantissa_bits, bias)
    with np.errstate(over="ignore", under="ignore"):  # not every midpoint is a float32
        x = points64(spec).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(INF)), np.nextafter(x, np.float32(0))])
    x = np.concatenate([x, np.ldexp(np.float32(1), np.arange(-149, -120)), np.float32(2.0**-149) * np.arange(64)])
    for dtype in (np.float32, np.float64):
        for rounding, _ in modes(spec):
            got = encode(x.astype(dtype), fmt, rounding=rounding)
            assert_codes_equal(got, encode_by_table(x, spec, rounding.name), x, f"{spec} {rounding.name}")


@pytest.mark.parametrize("exponent_bits, mantissa_bits", [(8, 0), (8, 2), (8, 5), (3, 5)])
@pytest.mark.parametrize("emax", [125, 126, 127, 128])
def test_formats_at_the_top_of_float32(exponent_bits, mantissa_bits, emax):
    bias = 2**exponent_bits - 1 - emax
    fmt = FloatFormat("HIGH", exponent_bits, mantissa_bits, bias)
    spec = oracle.Spec("HIGH", exponent_bits, mantissa_bits, bias)
    bits = np.concatenate([np.arange(0x7D000000, 0x7F800001, 0x1000), np.arange(0x7F7F0000, 0x7F800001)])
    x = bits.astype(np.uint32).view(np.float32)
    for rounding, _ in modes(spec):
        got = encode(x, fmt, rounding=rounding)
        assert_codes_equal(got, encode_by_table(x, spec, rounding.name), x, f"{spec} {rounding.name}")


@pytest.mark.parametrize("pair", NARROW, ids=name_of)
def test_round_to_is_the_value_of_the_code(pair):
    fmt, spec = pair
    x = encodable(points64(spec), spec)
    for rounding, overflow in modes(spec):
        codes = expected_by_fractions(spec, rounding.name, overflow.name)
        want = np.array([as_float64(oracle.decode(int(c), spec)) for c in codes])
        got = round_to(x, fmt, rounding=rounding, overflow=overflow)
        assert_floats_equal(got, want.astype(np.float32), x, f"{fmt} {rounding.name} {overflow.name}")


def fp32_boundaries() -> np.ndarray:
    """Boundaries of FP32 and their float64 neighbours: around powers of two, and 200 codes at random."""
    exponents = np.array([0, 1, 2, 23, 24, 100, 126, 127, 128, 150, 253, 254, 255])
    codes = (exponents[:, None] * 2**23 + np.array([-2, -1, 0, 1, 2])).reshape(-1)
    codes = np.concatenate([codes, np.random.default_rng(2).integers(0, 0x7F800000, 200)])
    codes = np.unique(codes[(codes >= 0) & (codes <= oracle.max_code(oracle.FP32))])
    x = np.array([float(b) for b in boundaries(oracle.FP32, codes.tolist())])
    x = np.concatenate([x, np.nextafter(x, INF), np.nextafter(x, -INF), [1e300, 5e-324, 2.0**-150, INF]])
    return np.concatenate([x, -x])


@pytest.mark.parametrize("mode", modes(oracle.FP32), ids=lambda m: f"{m[0].name}-{m[1].name}")
def test_FP32_boundaries_against_the_fractions(mode):
    rounding, overflow = mode
    x = fp32_boundaries()
    want = np.array([oracle.encode(float(v), oracle.FP32, rounding.name, overflow.name) for v in x])
    assert_codes_equal(encode(x, FP32, rounding=rounding, overflow=overflow), want, x, f"FP32 {mode}")


def test_float64_to_the_IEEE_formats_is_the_processors_conversion():
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.standard_normal(50_000) * np.exp2(rng.uniform(-160, 130, 50_000)), rng.normal(size=50_000)])
    with np.errstate(over="ignore", under="ignore"):
        want32, want16 = x.astype(np.float32).view(np.uint32), x.astype(np.float16).view(np.uint16)
    assert_codes_equal(encode(x, FP32, overflow=TO_NONFINITE), want32, x, "FP32")
    assert_codes_equal(encode(x, FP16, overflow=TO_NONFINITE), want16, x, "FP16")


# --------------------------------------------------------------------------------------------- every 16-bit input
@cache
def all_values(name: str) -> np.ndarray:
    """Every value of a 16-bit format, in code order, as float32: the oracle's."""
    spec = oracle.SPECS[name]
    return np.array([as_float64(oracle.decode(c, spec)) for c in range(2**16)]).astype(np.float32)


@pytest.mark.parametrize("pair", TABLED, ids=name_of)
@pytest.mark.parametrize("source", ["BF16", "FP16"])
def test_every_16_bit_input_against_the_table(pair, source):
    fmt, spec = pair
    x = encodable(all_values(source), spec)
    for rounding, overflow in modes(spec):
        want = encode_by_table(x, spec, rounding.name, overflow.name)
        for dtype in (np.float32, np.float64) if pair in CATALOG else (np.float32,):
            got = encode(x.astype(dtype), fmt, rounding=rounding, overflow=overflow)
            assert_codes_equal(got, want, x, f"{source} {dtype.__name__} to {fmt} {rounding.name} {overflow.name}")


@pytest.mark.parametrize("source", ["BF16", "FP16"])
def test_every_16_bit_input_is_exact_in_FP32(source):
    x = all_values(source)
    finite = np.isfinite(x)
    for rounding, overflow in modes(oracle.FP32):
        got = encode(x, FP32, rounding=rounding, overflow=overflow)
        assert_codes_equal(got[finite], x[finite].view(np.uint32), x[finite], f"{source} to FP32 {rounding.name}")
        assert_codes_equal(got[np.isnan(x)], np.where(np.signbit(x[np.isnan(x)]), 0xFFC00000, 0x7FC00000))


def test_every_FP16_input_as_float16_itself():
    bits = np.arange(2**16, dtype=np.uint16)
    x = bits.view(np.float16)
    x = x[~np.isnan(x)]
    assert_codes_equal(encode(x, FP16, overflow=TO_NONFINITE), x.view(np.uint16), x, "FP16 to FP16")
    assert_codes_equal(encode(x, E2M1), encode_by_table(x, oracle.E2M1), x, "FP16 to E2M1")


@pytest.mark.parametrize("pair", CATALOG + USER, ids=name_of)
def test_random_float32_bits_against_the_table(pair):
    fmt, spec = pair
    bits = np.random.default_rng(4).integers(0, 2**32, 100_000, dtype=np.uint32)
    x = encodable(bits.view(np.float32), spec)
    if spec.bits > 16:
        finite = np.isfinite(x)
        assert_codes_equal(encode(x[finite], fmt), x[finite].view(np.uint32), x[finite], str(fmt))
        return
    for rounding, overflow in modes(spec):
        want = encode_by_table(x, spec, rounding.name, overflow.name)
        got = encode(x, fmt, rounding=rounding, overflow=overflow)
        assert_codes_equal(got, want, x, f"{fmt} {rounding.name} {overflow.name}")


@pytest.mark.parametrize("size", [0, 1, 2**17 - 1, 2**17, 2**17 + 1])
def test_size_does_not_matter(size):
    x = np.resize(all_values("FP16")[:0x7C00], size)
    for array in (x, x.astype(np.float64)):
        assert_codes_equal(encode(array, E4M3), encode_by_table(x, oracle.E4M3), x, "E4M3")


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("pair", [p for p in CATALOG + USER if p[1].specials == "NONE"], ids=name_of)
def test_no_code_for_NaN_raises_and_names_the_first(pair):
    fmt, spec = pair
    for dtype in (np.float32, np.float64):
        x = np.ones((2, 3), dtype)
        x[1, 2] = NAN
        x[1, 1] = -NAN
        for rounding in (Rounding.TIES_TO_EVEN, Rounding.DOWN):
            with pytest.raises(ValueError, match=rf"encode: values.*nan at index \(1, 1\).*{fmt}"):
                encode(x, fmt, rounding=rounding)
    if spec.signed:
        assert encode([INF], fmt).tolist() == [oracle.encode(INF, spec)]
    else:
        for bad in (INF, -1.0, -INF):
            with pytest.raises(ValueError, match=f"encode: values.*{fmt}"):
                encode([1.0, bad], fmt)


@pytest.mark.parametrize("pair", [p for p in CATALOG + USER if p[1].specials == "NONE"], ids=name_of)
def test_nothing_nonfinite_to_overflow_to_raises(pair):
    for values in ([1.0], [1e30], []):
        with pytest.raises(ValueError, match=f"overflow.*TO_NONFINITE.*{pair[0]}"):
            encode(values, pair[0], overflow=TO_NONFINITE)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rounding": "TIES_TO_EVEN"},
        {"rounding": None},
        {"overflow": "SATURATE"},
        {"overflow": True},
        {"overflow": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("fmt", [E2M1, E4M3], ids=str)
def test_a_choice_that_is_no_enum_is_refused(fmt, arguments):
    (argument,) = arguments
    with pytest.raises((TypeError, ValueError), match=argument):
        encode(0.3, fmt, **arguments)


@pytest.mark.parametrize("fmt", ["E2M1", None, 4], ids=repr)
def test_a_format_that_is_no_format_is_refused(fmt):
    with pytest.raises(TypeError, match="fmt"):
        encode(0.3, fmt)
    with pytest.raises(TypeError, match="fmt"):
        decode([1], fmt)


def test_choices_are_keyword_only():
    with pytest.raises(TypeError):
        encode(0.3, E2M1, Rounding.UP)
