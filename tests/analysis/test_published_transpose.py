"""The model of the published transpose against its description, and beside the one that rounds."""

import numpy as np
import pytest

from mxsim.analysis.published_transpose import published_fp8_transpose
from mxsim.blocks import FP8_1X128, MXFP4, BlockTensor, fp8_row_to_fp8_col, quantize


def rows(codes, scales) -> BlockTensor:
    return BlockTensor(np.array(codes, np.uint8), np.array(scales, np.float32), FP8_1X128)


def described(code: int, d: int) -> int:
    sign, field, mantissa = code >> 7, code >> 3 & 15, code & 7
    if field == 0:
        return 0
    return sign * 128 + (field - d) * 8 + mantissa if field > d else sign * 128 + mantissa


def test_by_hand():
    got = published_fp8_transpose(rows([[0x0F, 0x08, 0x7F, 0x81], [0x38] * 4], [[1], [32]]))
    # 1.875 * 2**-6 -> 0.875 * 2**-6; 2**-6 -> 0; NaN -> 1.875 * 2**3; -2**-9 -> +0
    assert got.codes[:, 0].tolist() == [0x07, 0x00, 0x57, 0x00]
    assert (got.codes[:, 1] == 0x38).all()
    assert not got.codes[:, 2:].any()
    assert got.scales.tolist() == [[32.0]] * 4
    assert (got.shape, got.format, got.axis, got.source_rows) == ((4, 128), FP8_1X128, -1, 2)


def test_every_code_and_difference_as_described():
    codes = np.arange(256, dtype=np.uint8)
    for d in range(0, 40):
        got = published_fp8_transpose(rows([codes, codes], np.broadcast_to([[1], [2.0**d]], (2, 2))))
        assert got.codes[:, 0].tolist() == [described(code, d) for code in range(256)]
        assert got.codes[:, 1].tolist() == [described(code, 0) for code in range(256)]


def test_it_is_the_rounding_transpose_where_every_field_stays_positive():
    random = np.random.default_rng(0)
    codes = random.integers(0x30, 0x7F, (300, 200)) | random.integers(0, 2, (300, 200)) << 7  # fields 6 to 15
    t = rows(codes, 2.0 ** random.integers(-4, 2, (300, 2)))
    assert published_fp8_transpose(t).equal(fp8_row_to_fp8_col(t))


def test_tiles_have_their_own_scale_and_a_masked_row_takes_part():
    codes = np.full((130, 256), 0x38, np.uint8)
    codes[5, :128] = 0
    scales = np.full((130, 2), 2.0**-20)
    scales[5, 0] = 1
    got = published_fp8_transpose(rows(codes, scales))
    assert got.scales[[0, 127, 128, 255]].tolist() == [[1, 2.0**-20]] * 2 + [[2.0**-20] * 2] * 2
    assert got.codes[0, [0, 129]].tolist() == [0, 0x38]  # a field of 7 less 20, mantissa 0


def test_leading_axes_are_rows_and_nothing_stays_nothing():
    t = quantize(np.random.default_rng(1).standard_normal((2, 70, 130)), FP8_1X128)
    flat = rows(t.codes.reshape(140, 130), t.scales.reshape(140, 2))
    assert published_fp8_transpose(t).equal(published_fp8_transpose(flat))
    assert published_fp8_transpose(rows(np.zeros((0, 130)), np.zeros((0, 2)))).shape == (130, 0)


def test_refusals_name_the_argument():
    with pytest.raises(TypeError, match="t is a ndarray"):
        published_fp8_transpose(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="t is MXFP4"):
        published_fp8_transpose(quantize(np.ones((2, 32)), MXFP4))
    for scale in (np.nan, 3.0, 0.0, np.inf):
        with pytest.raises(ValueError, match="row 1, block 0, needed a power of two"):
            published_fp8_transpose(rows([[0], [0]], [[1], [scale]]))
