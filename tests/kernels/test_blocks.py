"""Both CPU backends against the simulator on every kind of block: rows, columns and tiles, dense and ragged."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from mxsim import kernels
from mxsim.blocks import (
    FP8_1X128,
    FP8_128X128,
    MXFP4,
    ScaleRule,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_row_to_fp4_row,
    fp8_row_to_fp8_col,
    quantize,
)
from tests.kernels import cases
from tests.kernels.expected import (
    Want,
    assert_bits_equal,
    assert_result,
    fp4_rows,
    fp8,
    fp8_cols,
    fp8_rows,
    mxfp4,
    quantized_cols,
    ragged_fp8_cols,
    ragged_fp8_rows,
    split,
)

pytestmark = pytest.mark.usefixtures("backend")
RULES = pytest.mark.parametrize("rule", [None, *ScaleRule])
NUM_ROWS = pytest.mark.parametrize("num_rows", [0, 1, 5, 128, 131, 260])
GROUPS = [[0, 1, 127, 128, 129, 0, 300, 0], [0], [], [0, 0, 5], [256], [1] * 9, [130, 0, 0, 130]]
GROUP_SIZES = pytest.mark.parametrize("sizes", GROUPS, ids=str)
MULTIPLES = pytest.mark.parametrize("multiple", [None, 1, 3, 128])


# ---------------------------------------------------------------------------------------------------------- MXFP4 rows
@RULES
@pytest.mark.parametrize("dtype", list(cases.FLOATS), ids=str)
def test_floats_to_FP4_rows(dtype, rule):
    x = cases.floats(150, 352, dtype, seed=1)
    assert_result(kernels.bf16_to_fp4_row(x, scale_rule=rule), fp4_rows(quantize(x, MXFP4, scale_rule=rule)))


@RULES
def test_FP8_rows_to_FP4_rows(rule):
    codes, scales = cases.fp8_rows(200, 512, seed=2)
    want = fp8_row_to_fp4_row(fp8(codes, scales), scale_rule=rule)
    assert_result(kernels.fp8_row_to_fp4_row(codes, scales, scale_rule=rule), fp4_rows(want))


def test_FP4_rows_to_BF16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes, scales = cases.fp4_rows(200, 352, seed=3)
    want = mxfp4(codes, scales).dequantize(ml_dtypes.bfloat16)
    assert_bits_equal(kernels.fp4_to_bf16(codes, scales), want.view(np.uint16), "bfloat16")


# ------------------------------------------------------------------------------------------------------------ FP8 rows
@NUM_ROWS
@pytest.mark.parametrize("headroom", [0, 3, 6])
def test_FP4_rows_to_FP8_rows(num_rows, headroom):
    codes, scales = cases.fp4_rows(num_rows, 384, seed=4)
    want = fp4_row_to_fp8_row(mxfp4(codes, scales), headroom=headroom)
    assert_result(kernels.fp4_row_to_fp8_row(codes, scales, headroom=headroom), fp8_rows(want))


@NUM_ROWS
def test_BF16_to_FP8_rows(num_rows):
    x = cases.floats(num_rows, 384, seed=5)
    assert_result(kernels.bf16_to_fp8_row(x), fp8_rows(quantize(x, FP8_1X128)))


@NUM_ROWS
@RULES
def test_BF16_to_FP4_and_FP8_rows(num_rows, rule):
    x = cases.floats(num_rows, 256, seed=6)
    want = quantize(x, MXFP4, scale_rule=rule)
    fp4, fp8_result = kernels.bf16_to_fp4_and_fp8_row(x, scale_rule=rule, headroom=5)
    assert_result(fp4, fp4_rows(want))
    assert_result(fp8_result, fp8_rows(fp4_row_to_fp8_row(want, headroom=5)))


# ----------------------------------------------------------------------------------------------------- ragged FP8 rows
def padded_to(multiple: int | None) -> dict[str, int]:
    return {} if multiple is None else {"row_multiple": multiple}


@GROUP_SIZES
@MULTIPLES
def test_FP4_rows_to_ragged_FP8_rows(sizes, multiple):
    codes, scales = cases.fp4_rows(sum(sizes), 256, seed=7)
    dense = fp4_row_to_fp8_row(mxfp4(codes, scales), headroom=2)
    got = kernels.fp4_row_to_fp8_row(codes, scales, headroom=2, group_sizes=sizes, **padded_to(multiple))
    assert_result(got, ragged_fp8_rows(dense.codes, dense.scales, sizes, multiple or 4))


@GROUP_SIZES
@MULTIPLES
def test_BF16_to_ragged_FP8_rows(sizes, multiple):
    x = cases.floats(sum(sizes), 256, seed=8)
    dense = quantize(x, FP8_1X128)
    got = kernels.bf16_to_fp8_row(x, group_sizes=sizes, **padded_to(multiple))
    assert_result(got, ragged_fp8_rows(dense.codes, dense.scales, sizes, multiple or 4))


@GROUP_SIZES
@MULTIPLES
def test_BF16_to_FP4_and_ragged_FP8_rows(sizes, multiple):
    x = cases.floats(sum(sizes), 256, seed=9)
    want = quantize(x, MXFP4)
    dense = fp4_row_to_fp8_row(want)
    fp4, fp8_result = kernels.bf16_to_fp4_and_fp8_row(x, group_sizes=sizes, **padded_to(multiple))
    assert_result(fp4, fp4_rows(want))
    assert_result(fp8_result, ragged_fp8_rows(dense.codes, dense.scales, sizes, multiple or 4))


@GROUP_SIZES
@MULTIPLES
def test_ragged_FP8_rows_keep_every_bit(sizes, multiple):
    codes, scales = cases.fp8_rows(sum(sizes), 256, seed=10)
    if scales.numel():  # no scale is refused or changed: neither 3.0 nor a NaN's payload
        scales.view(-1)[0] = 3.0
        scales.view(torch.int32).view(-1)[-1] = 0x7F812345
    got = kernels.fp8_row_to_ragged(codes, scales, group_sizes=sizes, **padded_to(multiple))
    assert_result(got, ragged_fp8_rows(codes.numpy(), scales.numpy(), sizes, multiple or 4))


# --------------------------------------------------------------------------------------------------------- FP8 columns
@NUM_ROWS
@pytest.mark.parametrize("headroom", [0, 6])
@pytest.mark.parametrize("num_columns", [32, 192])
def test_FP4_rows_to_FP8_columns(num_rows, num_columns, headroom):
    codes, scales = cases.fp4_rows(num_rows, num_columns, seed=11)
    want = fp4_row_to_fp8_col(mxfp4(codes, scales), headroom=headroom)
    assert_result(kernels.fp4_row_to_fp8_col(codes, scales, headroom=headroom), fp8_cols(want))


@NUM_ROWS
def test_FP8_rows_to_FP8_columns(num_rows):
    codes, scales = cases.fp8_rows(num_rows, 384, seed=12)
    want = fp8_row_to_fp8_col(fp8(codes, scales))
    assert_result(kernels.fp8_row_to_fp8_col(codes, scales), fp8_cols(want))


@NUM_ROWS
@pytest.mark.parametrize("num_columns", [32, 192])
def test_BF16_to_FP8_columns(num_rows, num_columns):
    x = cases.floats(num_rows, num_columns, seed=13)
    assert_result(kernels.bf16_to_fp8_col(x), fp8_cols(quantized_cols(x)))


@GROUP_SIZES
def test_FP4_rows_to_ragged_FP8_columns(sizes):
    codes, scales = cases.fp4_rows(sum(sizes), 96, seed=14)
    want = fp4_row_to_fp8_col(mxfp4(codes, scales), headroom=4, group_sizes=sizes)
    got = kernels.fp4_row_to_fp8_col(codes, scales, headroom=4, group_sizes=sizes)
    assert_result(got, ragged_fp8_cols(want, 96))


@GROUP_SIZES
def test_FP8_rows_to_ragged_FP8_columns(sizes):
    codes, scales = cases.fp8_rows(sum(sizes), 256, seed=15)
    want = fp8_row_to_fp8_col(fp8(codes, scales), group_sizes=sizes)
    assert_result(kernels.fp8_row_to_fp8_col(codes, scales, group_sizes=sizes), ragged_fp8_cols(want, 256))


@GROUP_SIZES
def test_BF16_to_ragged_FP8_columns(sizes):
    x = cases.floats(sum(sizes), 96, seed=16)
    want = [quantized_cols(part) for part in split(x, sizes)]
    assert_result(kernels.bf16_to_fp8_col(x, group_sizes=sizes), ragged_fp8_cols(want, 96))


def test_a_masked_token_does_not_flush_its_column_block():
    codes, scales = torch.full((128, 128), 0x38, dtype=torch.uint8), torch.full((128, 1), 2.0**-20)
    codes[7], scales[7] = 0x80, 1.0
    got = kernels.fp8_row_to_fp8_col(codes, scales)
    assert (got.scales == 2.0**-20).all()
    assert (got.codes.view(torch.uint8)[:, :7] == 0x38).all()
    assert (got.codes.view(torch.uint8)[:, 7] == 0x80).all()


@pytest.mark.parametrize(
    "code, gap, want",
    [(0x0F, 5, 0x00), (0x0F, 2, 0x04), (0x01, 1, 0x00), (0x03, 1, 0x02), (0x8F, 2, 0x84)],
)
def test_underflow_rounds_the_whole_significand(code, gap, want):
    # 0x0F is 1.875 * 2**-6, the case that a transpose without the implicit bit gets wrong
    codes = torch.full((2, 128), code, dtype=torch.uint8)
    scales = torch.tensor([[1.0], [2.0**-gap]])
    codes[0] = 0x38
    assert kernels.fp8_row_to_fp8_col(codes, scales).codes.view(torch.uint8)[0, 1] == want


# --------------------------------------------------------------------------------------------------------------- tiles
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (128, 128), (130, 300), (64, 700), (2, 3, 200, 96), (0, 5), (5, 0), (3, 0, 128, 128), (2, 129, 128)],
    ids=str,
)
def test_BF16_to_FP8_tiles(shape, transpose):
    count = int(np.prod(shape))
    w = cases.floats(1, -(-count // 32) * 32, seed=17).view(-1)[:count].reshape(shape)
    if count > 60_000:  # few tiles are without a NaN else
        w = torch.where(w.isfinite(), w, 1.0)
    want = quantize(w.mT if transpose else w, FP8_128X128)
    assert_result(kernels.bf16_to_fp8_tile(w, transpose=transpose), Want(want.codes, want.scales))


@pytest.mark.parametrize("largest", [2.0**-133, 2.0**-130, 2.0**-122, 2.0**-119, 1.0, 2.0**120, 3.0e38])
def test_BF16_to_FP8_at_the_ends_of_the_range(largest):
    rng = np.random.default_rng(18)
    x = torch.from_numpy(rng.uniform(-largest, largest, (256, 256)).astype(np.float32)).bfloat16()
    assert x.isfinite().all()
    assert_result(kernels.bf16_to_fp8_row(x), fp8_rows(quantize(x, FP8_1X128)))
    assert_result(kernels.bf16_to_fp8_col(x), fp8_cols(quantized_cols(x)))
    want = quantize(x.t(), FP8_128X128)
    assert_result(kernels.bf16_to_fp8_tile(x, transpose=True), Want(want.codes, want.scales))
