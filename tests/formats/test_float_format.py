"""The records: constants of the specification's table, derived ones for any other format, and what is refused."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from mxsim.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    INT8,
    CodeForm,
    FloatFormat,
    Overflow,
    Specials,
    decode,
    encode,
)
from tests import oracle
from tests.formats.pairs import CATALOG, USER, name_of

# name: bits, exponent bits, mantissa bits, bias, max finite, min normal, min subnormal
TABLE = {
    "E2M1": (4, 2, 1, 1, 6.0, 1.0, 0.5),
    "E2M3": (6, 2, 3, 1, 7.5, 1.0, 0.125),
    "E3M2": (6, 3, 2, 3, 28.0, 0.25, 0.0625),
    "E4M3": (8, 4, 3, 7, 448.0, 2.0**-6, 2.0**-9),
    "E5M2": (8, 5, 2, 15, 57344.0, 2.0**-14, 2.0**-16),
    "E8M0": (8, 8, 0, 127, 2.0**127, 2.0**-127, None),
    "INT8": (8, 1, 6, 1, 1.984375, 1.0, 1 / 64),
    "BF16": (16, 8, 7, 127, float.fromhex("0x1.fep127"), 2.0**-126, 2.0**-133),
    "FP16": (16, 5, 10, 15, 65504.0, 2.0**-14, 2.0**-24),
    "FP32": (32, 8, 23, 127, float.fromhex("0x1.fffffep127"), 2.0**-126, 2.0**-149),
}


@pytest.mark.parametrize("name", TABLE)
def test_constants_are_those_of_the_specification(name):
    fmt = FORMATS[name]
    fields = (fmt.bits, fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, fmt.max_finite, fmt.min_normal)
    assert fields == TABLE[name][:6]
    if TABLE[name][6] is not None:
        assert fmt.min_subnormal == TABLE[name][6]
    assert fmt.name == str(fmt) == name
    assert fmt.num_codes == 2**fmt.bits


def test_the_catalog_is_complete():
    assert set(FORMATS) == set(TABLE)
    assert [FORMATS[f.name] for f in (E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, BF16, FP16, FP32, INT8)] == [
        *FORMATS.values()
    ]


def test_special_values_are_those_of_the_specification():
    assert [n for n, f in FORMATS.items() if f.has_inf] == ["E5M2", "BF16", "FP16", "FP32"]
    assert [n for n, f in FORMATS.items() if f.has_nan] == ["E4M3", "E5M2", "E8M0", "BF16", "FP16", "FP32"]
    assert [n for n, f in FORMATS.items() if not f.signed] == ["E8M0"]
    assert (E4M3.nan_code, E5M2.nan_code, E8M0.nan_code, E2M1.nan_code) == (0x7F, 0x7F, 0xFF, None)
    assert (BF16.nan_code, FP16.nan_code, FP32.nan_code) == (0x7FC0, 0x7E00, 0x7FC00000)
    assert (E5M2.inf_code, BF16.inf_code, FP16.inf_code, FP32.inf_code) == (0x7C, 0x7F80, 0x7C00, 0x7F800000)
    assert (E4M3.inf_code, E2M1.inf_code, E8M0.inf_code) == (None, None, None)


def test_exponent_range_is_that_of_the_specification():
    assert [f.emax for f in (E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, INT8)] == [2, 2, 4, 8, 15, 127, 0]
    assert [f.emin for f in (E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, INT8)] == [0, 0, -2, -6, -14, -127, 0]


@pytest.mark.parametrize("pair", CATALOG + USER, ids=name_of)
def test_derived_constants_equal_the_oracle(pair):
    fmt, spec = pair
    assert (fmt.bits, fmt.num_codes, fmt.sign_mask, fmt.max_code) == (
        spec.bits,
        1 << spec.bits,
        spec.sign_bit,
        oracle.max_code(spec),
    )
    assert (Fraction(fmt.max_finite), Fraction(fmt.min_normal)) == (oracle.max_finite(spec), oracle.min_normal(spec))
    assert (fmt.emax, fmt.bias, fmt.nan_code) == (oracle.emax(spec), spec.bias, spec.nan)
    smallest_positive = next(m for m in oracle.magnitudes(spec) if m > 0)
    assert Fraction(fmt.min_subnormal) == smallest_positive
    assert (fmt.has_nan, fmt.has_inf) == (spec.specials != "NONE", spec.specials == "INF_AND_NAN")


@pytest.mark.parametrize("pair", CATALOG + USER, ids=name_of)
def test_code_dtype_is_the_smallest_that_fits(pair):
    fmt, spec = pair
    assert (
        fmt.code_dtype
        == {4: np.uint8, 8: np.uint8, 16: np.uint16, 32: np.uint32}[next(b for b in (4, 8, 16, 32) if b >= spec.bits)]
    )
    assert fmt.value_dtype == np.float32


def test_value_dtype_widens_where_float32_is_too_small():
    assert FloatFormat("E5M2_LOW", 5, 2, bias=160).value_dtype == np.float64
    assert FloatFormat("E8M24", 8, 24).value_dtype == np.float64
    assert decode([1], FloatFormat("E5M2_LOW", 5, 2, bias=160)).tolist() == [2.0**-161]


def test_a_binary64_format_is_float64():
    fp64 = FloatFormat("FP64", 11, 52, specials=Specials.INF_AND_NAN)
    assert (fp64.bits, fp64.code_dtype, fp64.value_dtype) == (64, np.uint64, np.float64)
    assert (fp64.max_finite, fp64.min_normal, fp64.min_subnormal) == (np.finfo(np.float64).max, 2.0**-1022, 5e-324)
    x = np.array([0.0, -0.0, 1.0, -1.5, 5e-324, -2.5e-308, np.finfo(np.float64).max, 0.1, -np.inf, np.nan])
    codes = encode(x, fp64, overflow=Overflow.TO_NONFINITE)
    assert [hex(c) for c in codes.tolist()] == [hex(c) for c in x.view(np.uint64).tolist()]
    assert decode(codes, fp64).view(np.uint64).tolist() == x.view(np.uint64).tolist()


def test_a_format_is_one_line_of_immutable_data():
    e3m4 = FloatFormat("E3M4", 3, 4)
    assert (e3m4.bias, e3m4.max_finite, e3m4.min_subnormal) == (3, 31.0, 2.0**-6)
    assert e3m4 == FloatFormat("E3M4", 3, 4, bias=3)
    assert len({e3m4, FloatFormat("E3M4", 3, 4), FloatFormat("E3M4", 3, 4, bias=4)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        e3m4.bias = 4


def test_E5M10_is_FP16():
    e5m10 = FloatFormat("E5M10", 5, 10, specials=Specials.INF_AND_NAN)
    bits = np.arange(2**16, dtype=np.uint16)
    assert np.array_equal(decode(bits, e5m10), bits.view(np.float16).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exponent_bits": 0, "mantissa_bits": 3}, "exponent_bits is 0"),
        ({"exponent_bits": 12, "mantissa_bits": 3}, "exponent_bits is 12"),
        ({"exponent_bits": 4, "mantissa_bits": -1}, "mantissa_bits is -1"),
        ({"exponent_bits": 4, "mantissa_bits": 53}, "mantissa_bits is 53"),
        ({"exponent_bits": 4, "mantissa_bits": 0, "specials": Specials.INF_AND_NAN}, "mantissa bit"),
        ({"exponent_bits": 4, "mantissa_bits": 3, "specials": Specials.NAN_IS_NEGATIVE_ZERO, "signed": False}, "sign"),
        ({"exponent_bits": 1, "mantissa_bits": 6, "code_form": CodeForm.TWOS_COMPLEMENT, "signed": False}, "sign"),
        ({"exponent_bits": 4, "mantissa_bits": 3, "nan_code": 0x7F}, "nan_code"),
        ({"exponent_bits": 5, "mantissa_bits": 2, "specials": Specials.INF_AND_NAN, "nan_code": 0x7C}, "nan_code"),
        ({"exponent_bits": 5, "mantissa_bits": 2, "bias": 1100}, "float64"),
        ({"exponent_bits": 11, "mantissa_bits": 2}, "float64"),
        ({"exponent_bits": 1, "mantissa_bits": 0, "specials": Specials.NAN_ALL_ONES}, ""),  # nothing but zero
        # two's complement is fixed point: one normal binade, which continues the subnormals
        ({"exponent_bits": 2, "mantissa_bits": 3, "code_form": CodeForm.TWOS_COMPLEMENT}, "exponent_bits"),
        (
            {"exponent_bits": 1, "mantissa_bits": 6, "code_form": CodeForm.TWOS_COMPLEMENT, "has_subnormals": False},
            "subnormals",
        ),
    ],
)
def test_a_bad_record_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=f"ODD.*{message}"):
        FloatFormat("ODD", **arguments)


@pytest.mark.parametrize(
    "field",
    [
        {"specials": "INF_AND_NAN"},
        {"specials": None},
        {"code_form": "TWOS_COMPLEMENT"},
        {"exponent_bits": 4.0},
        {"mantissa_bits": "3"},
        {"bias": 1.5},
        {"nan_code": "7"},
    ],
    ids=str,
)
def test_a_field_of_another_type_is_refused_by_name(field):
    (name,) = field
    with pytest.raises((TypeError, ValueError), match=name):
        FloatFormat(**({"name": "ODD", "exponent_bits": 4, "mantissa_bits": 3} | field))
