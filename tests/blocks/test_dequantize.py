"""dequantize is exact in float64 and one rounding of the exact value in every other dtype."""

from fractions import Fraction
from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest

from mxsim.blocks import (
    BLOCK_FORMATS,
    FP8_1X128,
    FP8_128X128,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    BlockTensor,
    ScaleRule,
    dequantize,
    quantize,
)
from tests import oracle
from tests.blocks.oracle_blocks import LAYOUTS, MX, block_lengths, each_block
from tests.compare import assert_codes_equal, assert_floats_equal, float_bits
from tests.oracle import FP16, FP32, TWO, Number

BF16 = np.dtype(ml_dtypes.bfloat16)
NARROW = [(np.dtype(np.float32), FP32), (np.dtype(np.float16), FP16), (BF16, oracle.BF16)]
EACH_NARROW = pytest.mark.parametrize("dtype, spec", NARROW, ids=lambda d: getattr(d, "name", ""))
FLT_MAX = np.finfo(np.float32).max


@lru_cache(maxsize=1 << 18)
def bits_of(n: Number, spec: oracle.Spec) -> int:
    """Storage bits of a number rounded to a float format, to nearest even, overflow to infinity; NaN is positive."""
    if n.kind == "nan":
        return oracle.nan_code(spec, False)
    if n.kind == "inf":
        return oracle.nonfinite_code(spec, n.negative)
    return oracle.encode(n, spec, overflow="TO_NONFINITE")


def times(n: Number, factor: Fraction | None) -> Number:
    if factor is None or n.kind == "nan":
        return Number(False, "nan", None)
    return Number(n.negative, n.kind, None if n.magnitude is None else n.magnitude * factor)


def float64_of(n: Number) -> float:
    if n.kind != "finite":
        return float("nan") if n.kind == "nan" else float("-inf" if n.negative else "inf")
    magnitude = float(n.magnitude)
    assert Fraction(magnitude) == n.magnitude
    return -magnitude if n.negative else magnitude


def every_pair(name: str, scale_codes) -> tuple[BlockTensor, list[Number]]:
    """Every code under every one of the scale codes, and the exact values, row after row."""
    fmt, spec = BLOCK_FORMATS[name], LAYOUTS[name].element
    row = np.resize(np.arange(1 << spec.bits, dtype=np.uint8), max(1 << spec.bits, 32))
    scale_codes = list(scale_codes)
    codes = np.tile(row, (len(scale_codes), 1))
    scales = np.repeat(np.array(scale_codes, np.uint8)[:, None], len(row) // 32, axis=1)
    elements = [oracle.decode(int(c), spec) for c in row]
    factors = [None if s == 0xFF else TWO ** (s - 127) for s in scale_codes]
    return BlockTensor(codes, scales, fmt), [times(n, f) for f in factors for n in elements]


# ------------------------------------------------------------------------------------------------------------ by hand
def test_by_hand():
    t = BlockTensor(np.array([[1, 15, 8, 2]], np.uint8), np.array([[0]], np.uint8), MXFP4)
    want = np.array([[0x00200000, 0x81400000, 0x80000000, 0x00400000]], np.uint32)  # 0.5, -6, -0, 1 times 2**-127
    assert_codes_equal(float_bits(t.dequantize()), want)


def test_a_NaN_scale_wins_over_everything():
    codes = np.array([[0x7C, 0x00, 0x3C, 0x80]], np.uint8)
    t = BlockTensor(codes, np.array([[0xFF]], np.uint8), MXFP8_E5M2)
    for dtype in (np.float64, np.float32, np.float16, BF16):
        assert_floats_equal(t.dequantize(dtype), np.full((1, 4), np.nan, dtype))


@pytest.mark.parametrize(
    "rule, decoded", [("FLOOR", 6 * 2.0**125), ("RCEIL", np.inf), ("CEIL", np.inf), ("EVEN", np.inf)]
)
def test_FLT_MAX_overflows_to_infinity_where_it_is_rounded_up(rule, decoded):
    t = quantize(np.array([[FLT_MAX, -FLT_MAX, 1.0]], np.float32), MXFP4, scale_rule=ScaleRule[rule])
    assert t.dequantize().tolist() == [[decoded, -decoded, 0.0]]
    exact = 2.0**128 if decoded == np.inf else decoded
    assert t.dequantize(np.float64).tolist() == [[exact, -exact, 0.0]]
    bf16 = t.dequantize(BF16)
    assert bf16.dtype == BF16
    assert bf16.astype(np.float64).tolist() == [[decoded, -decoded, 0.0]]


# ----------------------------------------------------------------------------------------------- every code and scale
@pytest.mark.parametrize("name", MX)
def test_float64_is_exact_for_every_code_and_every_scale(name):
    t, exact = every_pair(name, range(256))
    want = np.array([float64_of(n) for n in exact]).reshape(t.shape)
    assert_floats_equal(t.dequantize(np.float64), want)


@pytest.mark.parametrize("name", MX)
@EACH_NARROW
def test_other_dtypes_round_the_exact_value_once(name, dtype, spec):
    # the scales where the dtype has subnormals or overflows, a few in between, NaN
    low, high = {"float32": (0, 254), "float16": (98, 142), "bfloat16": (0, 254)}[dtype.name]
    span = {"MXFP8_E5M2": 14}.get(name, 6)
    scale_codes = [*range(max(low - 6, 0), low + span + 12, 2), 127, *range(high - span, min(high + 3, 255)), 255]
    t, exact = every_pair(name, scale_codes)
    want = np.array([bits_of(n, spec) for n in exact], f"u{dtype.itemsize}").reshape(t.shape)
    got = t.dequantize(dtype)
    assert got.dtype == dtype
    assert_codes_equal(float_bits(got), want, t.codes)


@EACH_NARROW
def test_FP8_with_any_FP32_scale_rounds_once(dtype, spec):
    rng = np.random.default_rng(0)
    bits = np.concatenate(
        [
            rng.integers(0, 0x7F800000, 40),
            np.array([0x00000000, 0x00000001, 0x00000003, 0x007FFFFF, 0x00800000, 0x00800001, 0x7F7FFFFF, 0x7F000000]),
            np.array([0x3F800001, 0x3FFFFFFF, 0x37800001, 0x33FFFFFF, 0x477FF000, 0x47000001, 0x7FC00000, 0x7F800001]),
        ]
    ).astype(np.uint32)
    scales = bits.view(np.float32)[:, None]
    codes = rng.integers(0, 256, (len(bits), 64)).astype(np.uint8)
    codes[:, :4] = 0x00, 0x80, 0x7F, 0xFF
    t = BlockTensor(codes, scales, FP8_1X128)
    want = np.zeros(codes.shape, f"u{dtype.itemsize}")
    exact = np.zeros(codes.shape)
    for i, b in enumerate(bits.tolist()):
        scale = oracle.decode(b, FP32)
        for j, c in enumerate(codes[i].tolist()):
            n = times(oracle.decode(c, oracle.E4M3), scale.magnitude)
            want[i, j], exact[i, j] = bits_of(n, spec), float64_of(n)
    assert_codes_equal(float_bits(t.dequantize(dtype)), want)
    assert_floats_equal(t.dequantize(np.float64), exact)


@EACH_NARROW
def test_NVFP4_rounds_the_product_of_three_factors_once(dtype, spec):
    rng = np.random.default_rng(1)
    codes = np.resize(np.arange(16, dtype=np.uint8), (0x80, 16))
    scales = np.arange(0x80, dtype=np.uint8)[:, None]
    for bits in (0x3F800001, 0x00000001, 0x00345679, 0x7F7FFFFF, *rng.integers(0, 0x7F800000, 3).tolist()):
        tensor_scale = oracle.decode(bits, FP32)
        t = BlockTensor(codes, scales, NVFP4, tensor_scale=np.uint32(bits).view(np.float32))
        want, exact = np.zeros(codes.shape, f"u{dtype.itemsize}"), np.zeros(codes.shape)
        for i in range(0, 0x80, 1 if bits == 0x3F800001 else 11):
            scale = oracle.decode(i, oracle.E4M3)
            for j in range(16):
                factor = None if scale.magnitude is None else scale.magnitude * tensor_scale.magnitude
                n = times(oracle.decode(j, oracle.E2M1), factor)
                want[i, j], exact[i, j] = bits_of(n, spec), float64_of(n)
        rows = slice(None, None, 1 if bits == 0x3F800001 else 11)
        assert_codes_equal(float_bits(t.dequantize(dtype))[rows], want[rows])
        assert_floats_equal(t.dequantize(np.float64)[rows], exact[rows])


def test_a_product_that_float32_steps_would_round_twice_is_rounded_once():
    # 1.5 * 1.875 * tensor scale has 29 bits: the float32 steps (scale * tensor scale) * element round twice
    rng = np.random.default_rng(2)
    tensor_scale = rng.uniform(1, 2, 200).astype(np.float32)
    differing = 0
    for s in tensor_scale:
        t = BlockTensor(np.full((1, 1), 3, np.uint8), np.full((1, 1), 0x3F, np.uint8), NVFP4, tensor_scale=s)
        exact = Fraction(3, 2) * Fraction(15, 8) * Fraction(float(s))
        assert float_bits(t.dequantize())[0, 0] == oracle.encode(exact, FP32)
        differing += float(np.float32(1.5) * (np.float32(1.875) * s)) != float(t.dequantize()[0, 0])
    assert differing > 0  # the model is not the float32 steps


# ---------------------------------------------------------------------------------------------------------- layout
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 130), (131, 5), (2, 20, 3)], ids=str)
def test_every_element_takes_the_scale_of_its_block(name, shape):
    fmt = BLOCK_FORMATS[name]
    axis = -2 if name == "FP8_128X1" else -1
    blocks = list(each_block(shape, block_lengths(name, len(shape), axis)))
    rng = np.random.default_rng(3)
    codes = np.full(shape, {"MXINT8": 64}.get(name, oracle.encode(1, LAYOUTS[name].element)), np.uint8)
    scales = np.zeros(fmt.scales_shape(shape, axis), np.float32 if fmt.scale.name == "FP32" else np.uint8)
    scales[...] = rng.integers(1, 100, scales.shape)
    t = BlockTensor(codes, scales, fmt, axis, np.float32(1) if fmt.tensor_scaled else None)
    got = dequantize(t, np.float64)
    values = t.scale_values()
    for block, indices in blocks:
        assert {got[i] for i in indices} == {values[block]}


def test_scale_values_are_exact_and_NaN_where_the_scale_is():
    scales = np.array([[0, 1, 127, 254, 255]], np.uint8)
    t = BlockTensor(np.zeros((1, 150), np.uint8), scales, MXFP4)
    want = np.array([[2.0**-127, 2.0**-126, 1, 2.0**127, np.nan]])
    assert_floats_equal(t.scale_values(), want)
    fp8 = BlockTensor(np.zeros((2, 3), np.uint8), np.array([[2.0**-149]], np.float32), FP8_128X128)
    assert fp8.scale_values().tolist() == [[2.0**-149]]
    nv = BlockTensor(np.zeros((1, 32), np.uint8), np.array([[0x7E, 0x7F]], np.uint8), NVFP4, tensor_scale=3.0)
    assert_floats_equal(nv.scale_values(), np.array([[448, np.nan]]))


# ---------------------------------------------------------------------------------------------------------- specials
def test_the_sign_of_zero_is_kept_in_every_dtype():
    t = BlockTensor(np.array([[0x00, 0x80, 0x01, 0x81]], np.uint8), np.array([[0]], np.uint8), MXFP8_E4M3)
    for dtype in (np.float64, np.float32, np.float16, BF16):
        signs = np.signbit(t.dequantize(dtype).astype(np.float64))
        assert signs.tolist() == [[False, True, False, True]]  # float16: 2**-136 underflows with its sign
    assert not np.signbit(BlockTensor(np.zeros((1, 1), np.uint8), np.zeros((1, 1), np.uint8), MXINT8).dequantize())


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16], ids=lambda d: np.dtype(d).name)
def test_NaN_is_the_positive_quiet_one(dtype):
    codes = np.array([[0x7F, 0xFF, 0x38]], np.uint8)
    fp8 = BlockTensor(codes, np.ones((1, 1), np.float32), FP8_1X128)
    poisoned = BlockTensor(codes, np.array([[0xFFC00001]], np.uint32).view(np.float32), FP8_1X128)
    e5m2 = BlockTensor(np.array([[0x7D, 0xFE, 0x7F]], np.uint8), np.array([[127]], np.uint8), MXFP8_E5M2)
    bits = {"float64": 0x7FF8 << 48, "float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}[np.dtype(dtype).name]
    unsigned = f"u{np.dtype(dtype).itemsize}"
    assert fp8.dequantize(dtype).view(unsigned)[0, :2].tolist() == [bits, bits]
    assert poisoned.dequantize(dtype).view(unsigned).tolist() == [[bits] * 3]
    assert e5m2.dequantize(dtype).view(unsigned).tolist() == [[bits] * 3]


def test_E5M2_infinities_stay_infinities():
    t = BlockTensor(np.array([[0x7C, 0xFC]], np.uint8), np.array([[0]], np.uint8), MXFP8_E5M2)
    for dtype in (np.float64, np.float32, np.float16, BF16):
        assert t.dequantize(dtype).astype(np.float64).tolist() == [[np.inf, -np.inf]]


def test_a_signalling_NaN_and_an_infinite_scale_decode_without_a_warning():
    for bits in (0x7F800001, 0xFF800001, 0x7FFFFFFF):
        scales = np.array([[bits]], np.uint32).view(np.float32)
        assert np.isnan(BlockTensor(np.zeros((1, 2), np.uint8), scales, FP8_1X128).dequantize()).all()
    t = BlockTensor(np.array([[0, 0x38, 0xB8]], np.uint8), np.array([[np.inf]], np.float32), FP8_1X128)
    assert_floats_equal(t.dequantize(), np.array([[np.nan, np.inf, -np.inf]], np.float32))


@pytest.mark.parametrize("dtype", [np.int32, np.longdouble, "float8_e4m3fn", complex, object], ids=str)
def test_other_dtypes_are_refused(dtype):
    dtype = getattr(ml_dtypes, dtype) if isinstance(dtype, str) else dtype
    with pytest.raises(TypeError, match=r"dequantize: dtype is .*, needed NumPy's float64, float32, float16 or ml_"):
        quantize(np.ones(3), MXFP4).dequantize(dtype)


def test_what_is_no_BlockTensor_is_refused():
    with pytest.raises(TypeError, match="dequantize: t is a ndarray, needed a BlockTensor"):
        dequantize(np.ones(3))


def test_float32_is_the_default_and_the_method_is_the_function():
    t = quantize(np.ones((2, 3)), MXFP4)
    assert t.dequantize().dtype == np.float32
    assert_floats_equal(t.dequantize(), dequantize(t))
    assert t.dequantize(BF16).dtype == BF16
    assert t.dequantize("float64").dtype == np.float64
