"""Agreement with ml_dtypes, another implementation, wherever it speaks of the same rule: nearest, ties to even.

Where it differs by design the difference is stated as a test: E5M2's NaN code, E8M0's ties, what overflow does in the
formats without infinity, and NaN in the formats without NaN.
"""

import ml_dtypes
import numpy as np
import pytest

from mxsim.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP16, Overflow, decode, encode
from tests.compare import assert_codes_equal, assert_floats_equal
from tests.formats.pairs import USER_FORMATS

# our format, ml_dtypes' name, overflow of ml_dtypes
SAME_RULE = [
    (E2M1, "float4_e2m1fn", Overflow.SATURATE),
    (E2M3, "float6_e2m3fn", Overflow.SATURATE),
    (E3M2, "float6_e3m2fn", Overflow.SATURATE),
    (E4M3, "float8_e4m3fn", Overflow.TO_NONFINITE),
    (E5M2, "float8_e5m2", Overflow.TO_NONFINITE),
    (BF16, "bfloat16", Overflow.TO_NONFINITE),
    (USER_FORMATS["E3M4"], "float8_e3m4", Overflow.TO_NONFINITE),
    (USER_FORMATS["E4M3_IEEE"], "float8_e4m3", Overflow.TO_NONFINITE),
    (USER_FORMATS["E4M3FNUZ"], "float8_e4m3fnuz", Overflow.TO_NONFINITE),
    (USER_FORMATS["E5M2FNUZ"], "float8_e5m2fnuz", Overflow.TO_NONFINITE),
    (USER_FORMATS["E4M3B11FNUZ"], "float8_e4m3b11fnuz", Overflow.TO_NONFINITE),
]


def float32_inputs() -> np.ndarray:
    """Every BF16 value with three tails of the significand, and random bits."""
    high = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    low = np.array([0, 1, 0x8000, 0x8001], np.uint32)
    bits = np.concatenate([(high[:, None] | low).reshape(-1), np.random.default_rng(18).integers(0, 2**32, 200_000)])
    return bits.astype(np.uint32).view(np.float32)


def cast(x: np.ndarray, name: str) -> np.ndarray:
    """ml_dtypes' codes."""
    with np.errstate(all="ignore"):
        converted = x.astype(getattr(ml_dtypes, name))
    return converted.view(f"u{converted.dtype.itemsize}")


@pytest.mark.parametrize(("fmt", "name", "overflow"), SAME_RULE, ids=[name for _, name, _ in SAME_RULE])
def test_encode_agrees(fmt, name, overflow):
    x = float32_inputs()
    nan = np.isnan(x)
    theirs = cast(x, name) & (fmt.num_codes - 1)
    assert_codes_equal(encode(x[~nan], fmt, overflow=overflow), theirs[~nan], x[~nan], name)
    if fmt.has_nan and fmt is not E5M2:
        assert_codes_equal(encode(x[nan], fmt, overflow=overflow), theirs[nan], x[nan], f"{name} NaN")


@pytest.mark.parametrize(("fmt", "name", "overflow"), SAME_RULE, ids=[name for _, name, _ in SAME_RULE])
def test_decode_agrees(fmt, name, overflow):
    codes = np.arange(fmt.num_codes, dtype=fmt.code_dtype)
    theirs = codes.view(getattr(ml_dtypes, name)).astype(np.float32)
    assert_floats_equal(decode(codes, fmt), theirs, codes, name)


@pytest.mark.parametrize(("fmt", "name", "overflow"), SAME_RULE, ids=[name for _, name, _ in SAME_RULE])
def test_constants_agree(fmt, name, overflow):
    info = ml_dtypes.finfo(getattr(ml_dtypes, name))
    assert fmt.bits == info.bits
    assert fmt.mantissa_bits == info.nmant
    assert fmt.max_finite == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)


def test_decode_of_E8M0_agrees():
    codes = np.arange(256, dtype=np.uint8)
    assert_floats_equal(decode(codes, E8M0), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), codes, "E8M0")


def test_FP16_agrees_with_NumPy():
    x = float32_inputs()
    x = x[~np.isnan(x)]
    with np.errstate(all="ignore"):
        want = x.astype(np.float16).view(np.uint16)
    assert_codes_equal(encode(x, FP16, overflow=Overflow.TO_NONFINITE), want, x, "FP16")


def test_where_ml_dtypes_departs():
    nan = np.array([np.nan, -np.nan], np.float32)
    assert cast(nan, "float8_e5m2").tolist() == [0x7E, 0xFE]
    assert encode(nan, E5M2).tolist() == [0x7F, 0xFF]  # as torch
    three = np.array([3.0], np.float32)
    assert cast(three, "float8_e8m0fnu").tolist() == [129]
    assert encode(three, E8M0).tolist() == [128]  # the even code
    assert encode(np.array([0.0, -1.0], np.float32), E8M0).tolist() == [0, 0xFF]


def test_E8M0_agrees_away_from_ties():
    x = float32_inputs()
    x = x[np.isfinite(x) & (x > 2.0**-126) & (x < 1.4 * 2.0**127)]
    fraction, _ = np.frexp(x)
    x = x[fraction != 0.75]
    assert_codes_equal(encode(x, E8M0), cast(x, "float8_e8m0fnu"), x, "E8M0")


def test_torch_agrees():
    torch = pytest.importorskip("torch")
    x = float32_inputs()
    x = x[~np.isnan(x)]
    for fmt, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2), (BF16, torch.bfloat16)):
        theirs = torch.from_numpy(x).to(dtype).view(torch.uint16 if fmt is BF16 else torch.uint8).numpy()
        inside = np.abs(x) <= fmt.max_finite  # torch's overflow differs between versions
        assert_codes_equal(encode(x[inside], fmt), theirs[inside], x[inside], str(dtype))
    nan = torch.tensor([float("nan")])
    assert nan.to(torch.float8_e5m2).view(torch.uint8).tolist() == encode(nan, E5M2).tolist() == [0x7F]
