"""NVFP4: a float32 scale for the tensor, an E4M3 scale for 16 elements, every operation rounded to float32."""

import ml_dtypes
import numpy as np
import pytest

from mxsim.blocks import NVFP4, NonFinite, ScaleOrder, quantize
from mxsim.formats import Rounding, philox_bits
from tests import oracle
from tests.blocks.adversarial import random_bit_patterns
from tests.blocks.oracle_blocks import Quantized, quantize_by_fractions
from tests.blocks.oracle_nvfp4 import nvfp4_by_arrays, nvfp4_by_steps
from tests.blocks.pairs import assert_quantized_equal, assert_tensors_equal, quantize_as_named
from tests.compare import assert_floats_equal

EACH_ORDER = pytest.mark.parametrize("order", ["PAPER", "TE"])
FLT_MAX = float(np.finfo(np.float32).max)


def test_NVFP4_by_hand():
    # amax 6: s_enc = 448, so that the block with 6 has scale 448 and codes x; half of it has scale 224
    t = quantize(np.array([[6, -3, 0.5, 2.5] + [0] * 12 + [3, -1.25, -0.0]], np.float32), NVFP4)
    assert t.scales.tolist() == [[0x7E, 0x76]]
    assert t.codes.tolist() == [[7, 13, 1, 4] + [0] * 12 + [7, 12, 8]]
    assert t.tensor_scale == np.float32(1) / np.float32(448)


def test_zeros_have_tensor_scale_1_and_no_scale():
    t = quantize(np.array([[0.0, -0.0]], np.float32), NVFP4)
    assert (t.codes.tolist(), t.scales.tolist(), t.tensor_scale) == ([[0, 0]], [[0]], 1.0)
    assert_floats_equal(t.dequantize(), np.zeros((1, 2), np.float32))


def test_a_block_whose_scale_rounds_to_0_has_codes_0():
    # 2**-10 / 448 of the largest scale ties to 0 in E4M3, whose smallest value is 2**-9
    x = np.zeros((1, 48), np.float32)
    x[0, [0, 16, 32]] = 448 * 6, -6 * 2.0**-10, 6 * 1.5 * 2.0**-10
    t = quantize(x, NVFP4)
    assert t.scales.tolist() == [[0x7E, 0, 1]]
    assert t.codes[0, [0, 16, 32]].tolist() == [7, 0, 6]  # 4.5 rounds to 4


def hard_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((4, 64)).astype(np.float32)
    spread = (normal * 2.0 ** rng.integers(-14, 1, (4, 4)).repeat(16, axis=1)).astype(np.float32)
    tensors = {
        "normal": normal,
        "bfloat16": normal.astype(ml_dtypes.bfloat16).astype(np.float32),
        "block scales from normal to subnormal and 0": spread,
        "tensor amax 6": np.clip(normal * 4, -6, 6),
        "subnormal": (spread.astype(np.float64) * 2.0**-127).astype(np.float32),
        "smallest": np.where(normal > 1, np.float32(2.0**-149), np.float32(0)) * np.sign(normal),
        "where s_enc stops at FLT_MAX": (normal.astype(np.float64) * 2688 / FLT_MAX).astype(np.float32),
        "just below FLT_MAX": (normal.astype(np.float64) / np.abs(normal).max() * FLT_MAX).astype(np.float32),
        "random bits": random_bit_patterns((4, 64), 1),
        "an infinity and NaNs": np.where(rng.random((4, 64)) < 0.02, np.float32(-np.inf), spread),
        "nothing finite": np.full((2, 16), np.nan, np.float32),
        "zeros": np.zeros((2, 32), np.float32),
    }
    # block scales on ties of E4M3: amax_b / 6 * s_enc in {2**-10, 3 * 2**-10, 17, 19, 21, 432, 447, 448}
    ties = np.zeros((1, 16 * 9), np.float32)
    ties[0, ::16] = [2688, 6 * 2.0**-10, 18 * 2.0**-10, 6 * 17, 6 * 19, 6 * 21, 6 * 432, 6 * 447, -2688]
    ties[0, 1::16] = ties[0, ::16] * np.float32(0.2083333)  # 1.25 of the block's 6, a tie before rounding
    tensors["ties of the block scale"] = ties
    return tensors


@EACH_ORDER
@pytest.mark.parametrize("label", hard_tensors())
def test_NVFP4_is_the_rational_model_and_the_float32_model(order, label):
    x = hard_tensors()[label]
    got = quantize(x, NVFP4, scale_order=ScaleOrder[order])
    assert_quantized_equal(got, quantize_by_fractions(x, "NVFP4", order=order), x, f"rational, {label}")
    assert_quantized_equal(got, Quantized(*nvfp4_by_steps(x, order)), x, f"step by step, {label}")
    assert_quantized_equal(got, Quantized(*nvfp4_by_arrays(x, order)), x, f"in arrays, {label}")


@EACH_ORDER
def test_NVFP4_is_the_float32_model_on_many_tensors(order):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        scale = 2.0 ** rng.integers(-150, 125)
        x = (rng.standard_normal((64, 64)) * 2.0 ** rng.integers(-10, 1, (64, 1)) * scale).astype(np.float32)
        x = random_bit_patterns((64, 64), seed) if seed % 5 == 0 else x
        got = quantize(x, NVFP4, scale_order=ScaleOrder[order])
        assert_quantized_equal(got, Quantized(*nvfp4_by_arrays(x, order)), x, f"seed {seed}")


@pytest.mark.parametrize("rounding", oracle.DETERMINISTIC_ROUNDINGS)
def test_the_rounding_is_that_of_the_elements_only(rounding):
    x = np.random.default_rng(3).standard_normal((3, 40)).astype(np.float32)
    got = quantize_as_named(x, "NVFP4", rounding=rounding)
    assert_quantized_equal(got, quantize_by_fractions(x, "NVFP4", rounding=rounding), x)
    assert (got.scales == quantize(x, NVFP4).scales).all()


def test_stochastic_rounding_of_NVFP4_is_draw_by_draw():
    x = np.random.default_rng(4).standard_normal((30, 64)).astype(np.float32)
    words = philox_bits(8, x.shape)
    for k in (3, 32):
        got = quantize(x, NVFP4, rounding=Rounding.STOCHASTIC, random_bits=words, num_random_bits=k)
        want = nvfp4_by_arrays(x, "PAPER", rounding="STOCHASTIC", random_words=words, k=k)
        assert_quantized_equal(got, Quantized(*want), x)


def test_the_default_order_is_PAPER():
    x = np.random.default_rng(5).standard_normal((100, 160)).astype(np.float32)
    assert_tensors_equal(quantize(x, NVFP4), quantize(x, NVFP4, scale_order=ScaleOrder.PAPER))


def test_the_orders_differ_in_few_block_scales_and_by_one_code():
    differing, total = 0, 0
    for seed in range(50):  # most BF16 tensors have none; where amax makes ties of E4M3, several in a hundred
        x = np.random.default_rng(seed).standard_normal((40, 1024)).astype(ml_dtypes.bfloat16)
        paper, te = (quantize(x, NVFP4, scale_order=o) for o in (ScaleOrder.PAPER, ScaleOrder.TE))
        assert paper.tensor_scale == te.tensor_scale
        gap = np.abs(paper.scales.astype(int) - te.scales)
        assert gap.max() <= 1
        differing, total = differing + int(gap.sum()), total + gap.size
    assert 0.0005 < differing / total < 0.005


def test_float64_is_rounded_to_float32_first():
    x = np.random.default_rng(6).standard_normal((30, 64)) * np.pi
    assert_tensors_equal(quantize(x, NVFP4), quantize(x.astype(np.float32), NVFP4))
    beyond = np.array([[1.0] * 16 + [1e300]])
    t = quantize(beyond, NVFP4)
    assert t.scales.tolist() == [[0x7E, 0x7F]]  # what float32 does not hold poisons its block, and no more
    with pytest.raises(ValueError, match=r"x has 1e\+300 at index \(0, 16\)"):
        quantize(beyond, NVFP4, nonfinite=NonFinite.RAISE)


def test_amax_of_the_tensor_leaves_out_what_is_not_finite():
    x = np.ones((2, 32), np.float32)
    x[0, 3], x[1, 20] = np.inf, np.nan
    t = quantize(x, NVFP4)
    assert t.tensor_scale == np.float32(1) / np.float32(2688)
    assert t.scales.tolist() == [[0x7F, 0x7E], [0x7E, 0x7F]]
    assert np.isnan(t.dequantize()).sum() == 32
    assert (t.codes[np.isnan(t.dequantize())] == 0).all()


def test_a_caller_that_raises_on_underflow_gets_the_same_bits():
    x = np.full((1, 16), 1e-40, np.float32)  # s_enc is FLT_MAX, 1 / s_enc no normal number
    want = quantize(x, NVFP4)
    with np.errstate(all="raise"):
        t = quantize(x, NVFP4)
    assert_tensors_equal(t, want)
