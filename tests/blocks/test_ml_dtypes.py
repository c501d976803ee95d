"""An independent witness: dividing exactly and casting to ml_dtypes gives the same codes and the same values."""

import ml_dtypes
import numpy as np
import pytest

from mxsim.blocks import BLOCK_FORMATS, quantize
from tests.blocks.adversarial import adversarial_blocks, random_bit_patterns, wide_range
from tests.blocks.oracle_blocks import LAYOUTS, MX
from tests.blocks.pairs import RULES
from tests.compare import assert_codes_equal, assert_floats_equal

DTYPES = {
    "MXFP4": ml_dtypes.float4_e2m1fn,
    "MXFP6_E2M3": ml_dtypes.float6_e2m3fn,
    "MXFP6_E3M2": ml_dtypes.float6_e3m2fn,
    "MXFP8_E4M3": ml_dtypes.float8_e4m3fn,
    "MXFP8_E5M2": ml_dtypes.float8_e5m2,
    "FP8_1X128": ml_dtypes.float8_e4m3fn,
    "FP8_128X1": ml_dtypes.float8_e4m3fn,
    "FP8_128X128": ml_dtypes.float8_e4m3fn,
}
EACH = pytest.mark.parametrize("name", DTYPES)
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)


def by_element(scales: np.ndarray, name: str, shape: tuple[int, int]) -> np.ndarray:
    """ml_dtypes' own value of each scale, one an element, as float64."""
    values = scales.view(ml_dtypes.float8_e8m0fnu) if scales.dtype == np.uint8 else scales
    rows, columns = LAYOUTS[name].block
    return values.astype(np.float64).repeat(rows, axis=0).repeat(columns, axis=1)[: shape[0], : shape[1]]


def inputs(name: str, rule: str) -> np.ndarray:
    hard = adversarial_blocks(LAYOUTS[name].element, rule, 0, np.float32, size=256, seed=1)
    rng = np.random.default_rng(2)
    smooth = (rng.standard_normal((100, 256)) * 2.0 ** rng.integers(-130, 120, (100, 1))).astype(np.float32)
    return np.concatenate([hard, wide_range((100, 256), 3), smooth])


@EACH
@EACH_RULE
def test_codes_are_casts_of_the_scaled_values(name, rule):
    x = inputs(name, rule.name)
    t = quantize(x, BLOCK_FORMATS[name], scale_rule=rule)
    scaled = x.astype(np.float64) / by_element(t.scales, name, x.shape)  # exact: powers of two
    largest = float(ml_dtypes.finfo(DTYPES[name]).max)
    cast = scaled.clip(-largest, largest).astype(np.float32).astype(DTYPES[name])
    # float32 holds the scaled value or loses what lies far below the smallest subnormal
    assert_codes_equal(t.codes, cast.view(np.uint8), x, f"{name} {rule.name}")


@EACH
@EACH_RULE
def test_values_are_products_of_ml_dtypes_values(name, rule):
    x = inputs(name, rule.name)
    t = quantize(x, BLOCK_FORMATS[name], scale_rule=rule)
    product = t.codes.view(DTYPES[name]).astype(np.float64) * by_element(t.scales, name, x.shape)
    assert_floats_equal(t.dequantize(np.float64), product)
    with np.errstate(over="ignore"):
        assert_floats_equal(t.dequantize(np.float32), product.astype(np.float32))


def test_MXINT8_is_rounding_to_64ths():
    x = inputs("MXINT8", "FLOOR")
    t = quantize(x, BLOCK_FORMATS["MXINT8"])
    scaled = 64 * x.astype(np.float64) / by_element(t.scales, "MXINT8", x.shape)
    want = np.rint(scaled).clip(-127, 127)
    assert (t.codes.view(np.int8) == want).all()
    product = want / 64 * by_element(t.scales, "MXINT8", x.shape)
    assert (t.dequantize(np.float64) == product).all()


def test_NVFP4_values_are_products_of_ml_dtypes_values():
    x = wide_range((64, 256), 4, (-12, 0))
    t = quantize(x, BLOCK_FORMATS["NVFP4"])
    scales = t.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64).repeat(16, axis=1)
    product = t.codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * scales * np.float64(t.tensor_scale)
    assert_floats_equal(t.dequantize(np.float64), product)
    assert_floats_equal(t.dequantize(), product.astype(np.float32))


@pytest.mark.parametrize("name", MX)
def test_scales_of_random_bits_are_ml_dtypes_floor_powers_of_two(name):
    x = random_bit_patterns((200, 64), 5)
    scales = quantize(x, BLOCK_FORMATS[name]).scales
    blocks = x.reshape(200, 2, 32)
    finite = np.isfinite(blocks).all(axis=-1)
    exponents = np.frexp(np.abs(np.where(finite[..., None], blocks, 1)).max(axis=-1))[1].astype(int) - 1
    emax = {"MXINT8": 0}.get(name) if name == "MXINT8" else int(np.log2(float(ml_dtypes.finfo(DTYPES[name]).max)))
    want = np.where(finite, (exponents - emax).clip(-127, 127) + 127, 0xFF)
    assert_codes_equal(scales, want)
    assert (np.isnan(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)) == ~finite).all()
