"""FP8 blocks: power-of-two scales by default, the FP32 scales of two libraries for comparison."""

import ml_dtypes
import numpy as np
import pytest

from mxsim.blocks import FP8_1X128, FP8_128X1, FP8_128X128, NonFinite, ScaleOrder, ScaleRule, quantize
from tests import oracle
from tests.blocks.adversarial import random_bit_patterns, significands, ulp_neighbours, wide_range
from tests.blocks.oracle_blocks import Quantized, quantize_by_fractions
from tests.blocks.pairs import RULES, assert_quantized_equal, assert_tensors_equal, quantize_as_named
from tests.compare import assert_codes_equal, assert_floats_equal
from tests.formats.table_codec import encode_by_table

ORDERS = pytest.mark.parametrize("order", ["TE", "DEEPGEMM"])
F = np.float32
FLT_MAX = np.finfo(F).max


def by_arrays(x: np.ndarray, order: str) -> Quantized:
    """Rows of 128 in float32 arithmetic, one NumPy operation a rounding."""
    blocks = x.reshape(len(x), -1, 128)
    with np.errstate(all="ignore"):
        good = np.isfinite(blocks).all(axis=-1)
        blocks = np.where(good[..., None], blocks, F(0))
        amax = np.abs(blocks).max(axis=-1)
        if order == "TE":
            factor = np.minimum(F(448) / amax, FLT_MAX)
            scale = F(1) / factor
        else:
            scale = amax / F(448)
            factor = np.minimum(F(1) / scale, FLT_MAX)
        zero = amax == 0
        scale, factor = np.where(zero, F(1), scale), np.where(zero, F(1), factor)
        scaled = blocks * np.where(scale == 0, F(0), factor)[..., None]
        scaled = np.where((scale == 0)[..., None], F(0), scaled)
    codes = np.where(good[..., None], encode_by_table(scaled, oracle.E4M3), 0x7F)
    return Quantized(codes.astype(np.uint8).reshape(x.shape), np.where(good, scale, F(np.nan)))


def test_orders_by_hand():
    x = np.zeros((1, 128), F)
    x[0, :3] = 3, -1, 0.01
    te, deepgemm = (quantize(x, FP8_1X128, scale_order=o) for o in (ScaleOrder.TE, ScaleOrder.DEEPGEMM))
    assert te.scales[0, 0] == F(1) / (F(448) / F(3))
    assert deepgemm.scales[0, 0] == F(3) / F(448)
    assert te.codes[0, :3].tolist() == deepgemm.codes[0, :3].tolist() == [0x7E, 0xF1, 0x3C]  # 448, -144, 1.5


@ORDERS
@pytest.mark.parametrize("name", ["FP8_1X128", "FP8_128X1"])
def test_FP32_scales_are_the_rational_model(name, order):
    rng = np.random.default_rng(1)
    amax = [3.0, 1.0, 448.0, 449.0, float(FLT_MAX), 2.0**-126, 1e-30, 2.0**-120, 0.0]
    x = (np.array(amax)[:, None] * np.append(rng.uniform(-1, 1, 40), [1.0, -0.0])).astype(F)
    x[8, 3] = -0.0
    x[6, 4] = np.nan
    axis = -1
    if name == "FP8_128X1":
        x, axis = x.T, -2
    got = quantize_as_named(x, name, order=order)
    assert_quantized_equal(got, quantize_by_fractions(x, name, axis=axis, order=order), x)


@ORDERS
def test_FP32_scales_are_the_float32_model_in_every_binade(order):
    s = significands(np.dtype(F))
    with np.errstate(under="ignore"):
        amax = np.unique(np.ldexp(s[:, None], np.arange(-149, 128)).astype(F).ravel())
    amax = np.append(amax[amax > 0], FLT_MAX)
    rng = np.random.default_rng(2)
    x = (amax[:, None].astype(np.float64) * rng.uniform(-1, 1, (len(amax), 128))).astype(F)
    x[np.arange(len(x)), rng.integers(0, 128, len(x))] = amax
    got = quantize(x, FP8_1X128, scale_order=ScaleOrder[order])
    assert_quantized_equal(got, by_arrays(x, order), x)
    x = random_bit_patterns((300, 256), 3)
    assert_quantized_equal(quantize(x, FP8_1X128, scale_order=ScaleOrder[order]), by_arrays(x, order), x)


@ORDERS
def test_elements_on_ties_after_scaling(order):
    # amax = 448 * 2**e: both scales are exactly 2**e, and the elements lie on every tie of E4M3 and beside it
    grid = np.array([float(oracle.magnitude(c, oracle.E4M3)) for c in range(0x7F)])
    points = np.concatenate([grid[1:], (grid[1:] + grid[:-1]) / 2]).astype(F)
    points = np.resize(ulp_neighbours(points), 127 * 6).reshape(6, 127)
    for e in (-20, 0, 90):
        x = np.concatenate([np.full((6, 1), 448, F), np.minimum(points, F(448))], axis=1) * F(2.0**e)
        got = quantize(x, FP8_1X128, scale_order=ScaleOrder[order])
        assert (got.scales == 2.0**e).all()
        assert_quantized_equal(got, quantize_by_fractions(x, "FP8_1X128"), x)


def test_DEEPGEMM_scale_that_underflows_to_0_has_codes_0():
    x = np.full((1, 128), -(2.0**-149), F)
    t = quantize(x, FP8_1X128, scale_order=ScaleOrder.DEEPGEMM)
    assert (t.scales == 0).all()
    assert (t.codes == 0).all()
    assert_floats_equal(t.dequantize(), np.zeros((1, 128), F))


def test_the_FP32_orders_differ_on_normal_data_as_published():
    scales, codes = [], []
    for seed in range(10):
        x = np.random.default_rng(seed).standard_normal((64, 1024)).astype(ml_dtypes.bfloat16)
        te, deepgemm = (quantize(x, FP8_1X128, scale_order=o) for o in (ScaleOrder.TE, ScaleOrder.DEEPGEMM))
        scales.append((te.scales != deepgemm.scales).mean())
        codes.append((te.codes != deepgemm.codes).mean())
    assert 1 / 3 < np.mean(scales) < 1 / 2
    assert 0 < np.max(codes) < 0.0015


@ORDERS
@pytest.mark.parametrize("fmt", [FP8_1X128, FP8_128X1, FP8_128X128], ids=str)
def test_tiles_rows_and_columns_follow_one_arithmetic(fmt, order):
    tile = wide_range((128, 128), 4, (-5, 5))
    got = quantize(tile, fmt, scale_order=ScaleOrder[order])
    blocks = {FP8_1X128: tile, FP8_128X1: tile.T, FP8_128X128: tile.reshape(1, -1)}[fmt]
    if fmt is FP8_128X128:  # one block: the row of 128 that holds amax has its scale, and there its codes
        row = int(np.argmax(np.abs(tile).max(axis=1)))
        want = by_arrays(tile[row : row + 1], order)
        assert_floats_equal(got.scales, want.scales)
        assert_codes_equal(got.codes[row], want.codes[0])
        return
    want = by_arrays(np.ascontiguousarray(blocks), order)
    transposed = fmt is FP8_128X1
    assert_codes_equal(got.codes, want.codes.T if transposed else want.codes)
    assert_floats_equal(got.scales, np.ascontiguousarray(want.scales.T) if transposed else want.scales)


def test_the_default_is_RCEIL_which_is_TransformerEngines_power_of_two():
    x = random_bit_patterns((64, 256), 5)
    assert_tensors_equal(quantize(x, FP8_1X128), quantize(x, FP8_1X128, scale_rule=ScaleRule.RCEIL))
    amax = np.abs(np.where(np.isfinite(x), x, 0).reshape(64, 2, 128)).max(axis=-1).astype(np.float64)
    got = quantize(x, FP8_1X128).scale_values()
    finite = ~np.isnan(got)
    inverse = 448 / amax[finite]  # 448 / amax rounded down to a power of two is 1 / scale, except where that clamps
    assert (np.minimum(np.exp2(-np.frexp(inverse)[1] + 1.0), 2.0**127) == got[finite]).all()


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@pytest.mark.parametrize("fmt", [FP8_1X128, FP8_128X1, FP8_128X128], ids=str)
def test_scales_are_powers_of_two_or_NaN(rule, fmt):
    x = random_bit_patterns((150, 140), 6)
    scales = quantize(x, fmt, scale_rule=rule).scales
    finite = scales[~np.isnan(scales)]
    significand, exponent = np.frexp(finite)
    assert (significand == 0.5).all()
    assert exponent.min(initial=0) >= -126
    assert exponent.max(initial=0) <= 128


@ORDERS
def test_a_non_finite_element_gives_a_NaN_scale_and_NaN_codes(order):
    x = np.ones((2, 256), F)
    x[0, 130], x[1, 0] = -np.inf, np.nan
    t = quantize(x, FP8_1X128, scale_order=ScaleOrder[order])
    assert np.isnan(t.scales).tolist() == [[False, True], [True, False]]
    assert (t.codes[0, 128:] == 0x7F).all()
    assert (t.codes[1, :128] == 0x7F).all()
    with pytest.raises(ValueError, match=r"x has -inf at index \(0, 130\)"):
        quantize(x, FP8_1X128, scale_order=ScaleOrder[order], nonfinite=NonFinite.RAISE)


@ORDERS
def test_float64_is_rounded_to_float32_under_FP32_scales_only(order):
    x = np.random.default_rng(7).standard_normal((3, 200)) * np.pi
    rounded = quantize(x.astype(F), FP8_1X128, scale_order=ScaleOrder[order])
    assert_tensors_equal(quantize(x, FP8_1X128, scale_order=ScaleOrder[order]), rounded)
    tie = np.array([[256.0, 17.0 + 2.0**-40, 17.0]])  # between 16 and 18: float64 still sees which side
    assert quantize(tie, FP8_1X128).codes.tolist() == [[0x78, 0x59, 0x58]]
