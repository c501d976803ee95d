"""The counting of lossless groups against the conversion itself."""

import numpy as np
import pytest

from mxsim.analysis import exponent_spread, is_lossless
from mxsim.blocks import MXFP4, MXFP8_E4M3, BlockTensor, fp4_row_to_fp8_row, quantize


def random_tensor(seed: int, columns: int, max_spread: int = 24) -> BlockTensor:
    """Codes from a few kinds of block (all, coarse only, sparse, zero), scales from a window, some NaN."""
    random = np.random.default_rng(seed)
    rows, num_blocks = 60, -(-columns // 32)
    choices = [np.arange(16), np.array([0, 4, 7]), np.array([0, 0, 0, 1]), np.array([0, 8]), np.array([6])]
    blocks = [[random.choice(choices[random.integers(5)], 32) for _ in range(num_blocks)] for _ in range(rows)]
    codes = np.array(blocks, np.uint8).reshape(rows, -1)[:, :columns]
    scales = random.integers(100, 100 + max_spread, (rows, num_blocks)).astype(np.uint8)
    scales[random.random(scales.shape) < 0.05] = 0xFF
    scales[random.random(scales.shape) < 0.05] = 0
    return BlockTensor(np.ascontiguousarray(codes), scales, MXFP4)


def lossless_by_conversion(t: BlockTensor, headroom: int) -> np.ndarray:
    """Compare every value before and after, NaN with NaN."""
    before = t.dequantize(np.float64)
    after = fp4_row_to_fp8_row(t, headroom=headroom).dequantize(np.float64)
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    return np.logical_and.reduceat(same, np.arange(0, t.shape[1], 128), axis=1)


@pytest.mark.parametrize("headroom", range(7))
@pytest.mark.parametrize("columns", [128, 384, 500])
def test_a_group_is_lossless_iff_the_conversion_keeps_its_values(headroom, columns):
    seen = set()
    for seed in range(4):
        t = random_tensor(seed, columns)
        expected = lossless_by_conversion(t, headroom)
        np.testing.assert_array_equal(is_lossless(t, headroom=headroom), expected)
        seen |= set(expected.ravel().tolist())
    assert seen == {False, True}


@pytest.mark.parametrize("headroom", [0, 6])
@pytest.mark.parametrize("code, lowest_bit", [(1, -1), (2, 0), (3, -1), (4, 1), (5, 0), (6, 2), (7, 1), (15, 1)])
def test_the_limit_of_each_code(headroom, code, lowest_bit):
    limit = headroom + 9 + lowest_bit
    for d, expected in ((limit, True), (limit + 1, False)):
        codes = np.zeros((1, 64), np.uint8)
        codes[0, 0], codes[0, 32] = 2, code
        t = BlockTensor(codes, np.array([[100 + d, 100]], np.uint8), MXFP4)
        assert is_lossless(t, headroom=headroom).item() is expected
        assert lossless_by_conversion(t, headroom).item() is expected


def test_spread_leaves_out_zero_blocks_and_nan_scales():
    codes = np.zeros((4, 128), np.uint8)
    codes[0, ::32] = 1  # four blocks that count
    codes[1, [0, 64]] = 1  # two of them
    codes[2, 0] = 8  # -0 only
    scales = np.array([[10, 15, 11, 255], [90, 3, 97, 255], [1, 2, 3, 4], [255] * 4], np.uint8)
    np.testing.assert_array_equal(exponent_spread(BlockTensor(codes, scales, MXFP4)), [[5], [7], [-1], [-1]])


def test_any_axis_is_the_last_axis_transposed():
    x = np.random.default_rng(0).standard_normal((300, 5)) * np.exp2(np.arange(300) / 9)[:, None]
    down, along = quantize(x, MXFP4, axis=0), quantize(x.T, MXFP4)
    np.testing.assert_array_equal(exponent_spread(down), exponent_spread(along))
    np.testing.assert_array_equal(is_lossless(down, headroom=0), is_lossless(along, headroom=0))


def test_other_formats_and_headrooms_are_refused():
    t = quantize(np.ones((1, 32)), MXFP8_E4M3)
    with pytest.raises(ValueError, match="MXFP8_E4M3"):
        exponent_spread(t)
    with pytest.raises(ValueError, match="headroom is 7"):
        is_lossless(quantize(np.ones((1, 32)), MXFP4), headroom=7)
