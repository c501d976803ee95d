"""decode: every code of every format, against the definition in Fractions."""

import numpy as np
import pytest

from mxsim.formats import E2M1, E4M3, E5M2, E8M0, FP32, INT8, decode, encode
from tests import oracle
from tests.compare import assert_codes_equal, assert_floats_equal
from tests.formats.pairs import CATALOG, TABLED, USER, as_float64, name_of


def test_E2M1_by_hand():
    want = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    assert_floats_equal(decode(np.arange(16, dtype=np.uint8), E2M1), want)


def test_special_codes_by_hand():
    assert_floats_equal(decode([0x7E, 0x7F, 0xFF, 0x80], E4M3), np.array([448, np.nan, -np.nan, -0.0], np.float32))
    want = np.array([57344, np.inf, -np.inf, np.nan, np.nan, -np.nan], np.float32)
    assert_floats_equal(decode([0x7B, 0x7C, 0xFC, 0x7D, 0x7E, 0xFF], E5M2), want)
    assert_floats_equal(decode([0, 0xFE, 0xFF], E8M0), np.array([2.0**-127, 2.0**127, np.nan], np.float32))
    assert_floats_equal(decode([0, 0x7F, 0x80, 0x81, 0xFF], INT8), np.array([0, 127, -128, -127, -1], np.float32) / 64)


@pytest.mark.parametrize("pair", TABLED, ids=name_of)
def test_every_code_decodes_to_its_definition(pair):
    fmt, spec = pair
    codes = np.arange(fmt.num_codes, dtype=fmt.code_dtype)
    want = np.array([as_float64(oracle.decode(c, spec)) for c in range(fmt.num_codes)])
    assert_floats_equal(decode(codes, fmt), want.astype(np.float32), codes, fmt.name)


def test_FP32_decodes_to_its_fields():
    exponents = np.arange(256, dtype=np.uint32) << 23
    fractions = np.array([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF, 0x2AAAAA], np.uint32)
    codes = (exponents[:, None] | fractions).reshape(-1)
    codes = np.concatenate([codes, codes | np.uint32(0x80000000)])
    want = np.array([as_float64(oracle.decode(int(c), oracle.FP32)) for c in codes])
    assert_floats_equal(decode(codes, FP32), want.astype(np.float32), codes, "FP32")


@pytest.mark.parametrize("pair", TABLED, ids=name_of)
def test_decode_then_encode_is_identity(pair):
    fmt, spec = pair
    codes = np.arange(fmt.num_codes, dtype=fmt.code_dtype)
    values = decode(codes, fmt)
    keep = np.isfinite(values)
    if spec.twos_complement:
        keep &= codes != spec.sign_bit  # -2 decodes and is never produced
    for array in (values[keep], values[keep].astype(np.float64)):
        assert_codes_equal(encode(array, fmt), codes[keep], array, fmt.name)


@pytest.mark.parametrize("pair", [p for p in CATALOG + USER if p[1].nan is not None], ids=name_of)
def test_every_NaN_code_becomes_the_formats_NaN_of_its_sign(pair):
    fmt, spec = pair
    if spec.bits <= 16:
        codes = np.arange(fmt.num_codes, dtype=fmt.code_dtype)
        codes = codes[np.isnan(decode(codes, fmt))]
    else:
        codes = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
    assert codes.size
    negative = [oracle.decode(int(c), spec).negative for c in codes]
    want = np.array([oracle.nan_code(spec, n) for n in negative])
    assert_codes_equal(encode(decode(codes, fmt), fmt), want, codes, fmt.name)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64, np.uint64, ">u2", ">i4", np.uint32])
def test_codes_may_have_any_integer_dtype(dtype):
    codes = np.arange(16).astype(dtype)
    assert_floats_equal(decode(codes, E2M1), decode(np.arange(16, dtype=np.uint8), E2M1))


def test_shape_is_kept():
    assert decode(np.zeros((2, 0, 3), np.uint8), E4M3).shape == (2, 0, 3)
    assert decode([], E4M3).shape == (0,)
    assert decode(np.uint8(0x38), E4M3).shape == ()
    assert decode(0x38, E4M3) == 1.0
    codes = np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert_floats_equal(decode(codes.T[::2], E4M3), decode(np.ascontiguousarray(codes.T[::2]), E4M3))


def test_the_result_is_the_callers_own():
    first = decode(np.arange(16, dtype=np.uint8), E2M1)
    first[:] = 99
    assert decode([7], E2M1).tolist() == [6.0]


def test_bad_codes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"decode: codes holds 16.*0 to 15 for E2M1"):
        decode([3, 16], E2M1)
    with pytest.raises(ValueError, match=r"decode: codes holds -1"):
        decode(np.array([-1], np.int8), E4M3)
    with pytest.raises(ValueError, match=r"decode: codes holds 256"):
        decode(np.array([256], np.uint16), E4M3)
    for bad in ([1.0], ["1"], [True], np.zeros(2, complex), np.array([object()])):
        with pytest.raises(TypeError, match="decode: codes has dtype"):
            decode(bad, E4M3)
