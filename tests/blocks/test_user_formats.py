"""A block format is data: another element, block or scale needs no new code."""

import numpy as np
import pytest

from mxsim.blocks import MXFP4, MXFP8_E5M2, BlockFormat, BlockTensor, ScaleOrder, ScaleRule, quantize
from mxsim.formats import E2M1, E4M3, E5M2, E8M0, FP16, FP32, FloatFormat, Specials
from tests import oracle
from tests.blocks.adversarial import adversarial_blocks, random_bit_patterns
from tests.blocks.pairs import RULES
from tests.compare import assert_codes_equal, assert_floats_equal

E3M3 = FloatFormat("E3M3_FN", 3, 3, specials=Specials.NAN_ALL_ONES)
MX_E3M3 = BlockFormat("MX_E3M3", E3M3, (1, 48), E8M0, ScaleRule.RCEIL)
FP8_E5M2 = BlockFormat("FP8_E5M2_1X32", E5M2, (1, 32), FP32, ScaleRule.RCEIL)


def test_bits_and_shapes_follow_from_the_record():
    assert (MX_E3M3.block_size, MX_E3M3.bits_per_element) == (48, 7 + 8 / 48)
    t = quantize(np.ones((3, 100)), MX_E3M3)
    assert (t.scales.shape, t.nbytes) == ((3, 3), 3 * 88 + 9)
    columns = BlockFormat("COLUMNS", E4M3, (16, 1), E8M0, ScaleRule.FLOOR)
    assert quantize(np.ones((33, 2)), columns).scales.shape == (3, 2)
    tiles = BlockFormat("TILES", E4M3, (16, 8), E8M0, ScaleRule.FLOOR)
    assert quantize(np.ones((2, 33, 9)), tiles).scales.shape == (2, 3, 2)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_another_element_and_block_size_against_the_oracle(rule):
    spec = oracle.USER_SPECS["E3M3_FN"]
    x = adversarial_blocks(spec, rule.name, 2, np.float32, size=48)
    t = quantize(x, MX_E3M3, scale_rule=rule)
    want = [oracle.quantize_block(row, spec, rule.name) for row in x]
    assert_codes_equal(t.codes, np.array([codes for codes, _ in want]), x)
    assert t.scales[:, 0].tolist() == [scale for _, scale in want]


def test_FP32_scales_take_the_limit_and_the_NaN_of_their_element():
    x = random_bit_patterns((200, 64), 1)
    t, mx = quantize(x, FP8_E5M2), quantize(x, MXFP8_E5M2, scale_rule=ScaleRule.RCEIL)
    poisoned = np.isnan(t.scales)
    assert (poisoned == (mx.scales == 0xFF)).all()
    assert_floats_equal(t.scale_values()[~poisoned], mx.scale_values()[~poisoned])
    by_element = np.repeat(poisoned, 32, axis=1)
    assert_codes_equal(t.codes, np.where(by_element, 0x7F, mx.codes))
    te = quantize(np.array([[3.0, -3.0]], np.float32), FP8_E5M2, scale_order=ScaleOrder.TE)
    assert te.scales[0, 0] == np.float32(1) / (np.float32(57344) / np.float32(3))
    assert te.codes.tolist() == [[0x7B, 0xFB]]
    fp4 = BlockFormat("FP4_FP32", E2M1, (1, 32), FP32, ScaleRule.RCEIL)
    assert quantize([[np.nan, 1.0]], fp4).codes.tolist() == [[0, 0]]
    deepgemm = quantize(np.array([[7.0]], np.float32), fp4, scale_order=ScaleOrder.DEEPGEMM)
    assert (deepgemm.scales[0, 0], deepgemm.codes[0, 0]) == (np.float32(7) / np.float32(6), 7)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_file_of_a_format_that_load_would_not_find_is_not_written(tmp_path, suffix):
    other = BlockFormat("MXFP4", E4M3, (1, 32), E8M0, ScaleRule.FLOOR)  # the name is taken
    for fmt in (MX_E3M3, other):
        with pytest.raises(ValueError, match=f"save: format is {fmt.name}, needed one of MXFP4, "):
            quantize(np.ones((1, 3)), fmt).save(tmp_path / f"t{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_an_element_that_ml_dtypes_lacks_is_refused():
    t = quantize(np.ones((1, 3)), MX_E3M3)
    with pytest.raises(TypeError, match="E3M3_FN has no dtype in ml_dtypes"):
        t.to_ml_dtypes()
    with pytest.raises(TypeError, match="E3M3_FN has no dtype in ml_dtypes"):
        BlockTensor.from_ml_dtypes(*quantize(np.ones((1, 3)), MXFP4).to_ml_dtypes(), MX_E3M3)


def test_a_format_without_a_default_rule_needs_one() -> None:
    fmt = BlockFormat("NO_RULE", E2M1, (1, 32), E8M0, None)
    with pytest.raises(ValueError, match="scale_rule is None, but NO_RULE has no default rule"):
        quantize([1.0] * 32, fmt)
    assert quantize([1.0] * 32, fmt, scale_rule=ScaleRule.FLOOR).scales.tolist() == [125]


E7M0_LOW = FloatFormat("E7M0_LOW", 7, 0, bias=200)  # its subnormals lie below those of float32


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_elements_finer_than_float32_lose_nothing_from_float32_inputs(rule):
    fmt = BlockFormat("WIDE", E7M0_LOW, (1, 32), E8M0, rule)
    x = np.ldexp(np.float32(1), np.array([[54, 0, -20, -60, -71]], np.int32))
    t = quantize(x, fmt)
    assert_codes_equal(t.codes, quantize(x.astype(np.float64), fmt).codes, x)
    assert_floats_equal(t.dequantize(np.float64), x.astype(np.float64))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ((FP16, (1, 32), E8M0, None), ValueError, "element is FP16, needed a signed format of at most 8 bits"),
        ((E8M0, (1, 32), E8M0, None), ValueError, "element is E8M0, needed a signed format"),
        ((E2M1, (1, 32), E5M2, None), ValueError, "scale is E5M2, needed E8M0 or FP32"),
        ((E2M1, (1, 16), E4M3, None), ValueError, "scale is E4M3, needed E8M0 or FP32"),
        ((E4M3, (1, 16), E4M3, None, True), ValueError, "a tensor scale needs elements E2M1 and scales E4M3"),
        ((E2M1, (0, 16), E8M0, None), ValueError, r"block_shape is \(0, 16\), needed two positive integers"),
        ((E2M1, 32, E8M0, None), ValueError, "block_shape is 32, needed two positive integers"),
        ((E2M1, (1, 32), "E8M0", None), TypeError, "scale is 'E8M0', needed a FloatFormat"),
        ((E2M1, (1, 32), E8M0, "floor"), TypeError, "default_scale_rule is 'floor', needed a ScaleRule or None"),
    ],
)
def test_blocks_without_a_definition_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        BlockFormat("OTHER", *fields)
