"""Rows -> FP8 columns, from FP4 and from FP8: every code and gap, ragged groups, tails, padding, masked rows, NaN."""

import numpy as np
import pytest

from mxsim.blocks import (
    FP8_1X128,
    MXFP4,
    BlockTensor,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_row_to_fp8_col,
    quantize,
)
from mxsim.formats import E4M3, encode
from tests import oracle
from tests.blocks.oracle_blocks import Quantized
from tests.blocks.oracle_convert import NAN, columns_of, powers_of_two
from tests.blocks.pairs import assert_quantized_equal, assert_tensors_equal, random_fp4, random_fp8
from tests.compare import assert_codes_equal, assert_floats_equal

BOTH = pytest.mark.parametrize("convert", [fp4_row_to_fp8_col, fp8_row_to_fp8_col])
GROUPS = [[0, 1, 127, 128, 129, 0, 300, 0], [0], [0, 0, 5], [256], [1] * 9, [130, 0, 0, 130]]
ALL_CODES = np.arange(256, dtype=np.uint8)


def random_source(convert, rows: int, columns: int, seed: int = 0) -> BlockTensor:
    return (random_fp4 if convert is fp4_row_to_fp8_col else random_fp8)(rows, columns, seed)


def exponents_of(t: BlockTensor) -> np.ndarray:
    """Scale exponents, NAN for NaN."""
    values = t.scale_values()
    return np.where(np.isnan(values), NAN, np.frexp(np.where(np.isnan(values), 1, values))[1] - 1)


def wanted(convert, source: BlockTensor, headroom: int = 6) -> Quantized:
    spec, headroom = (oracle.E2M1, headroom) if convert is fp4_row_to_fp8_col else (oracle.E4M3, 0)
    codes, exponents = columns_of(source.codes, exponents_of(source), spec, headroom)
    return Quantized(codes, powers_of_two(exponents))


def rows_of(source: BlockTensor, start: int, count: int) -> BlockTensor:
    part = slice(start, start + count)
    return BlockTensor(source.codes[part], source.scales[part], source.format)


# ------------------------------------------------------------------------------------------------------------ by hand
def test_FP4_columns_by_hand():
    # rows with scales 1, 2**-14, 2**-15, NaN; 6 * 2**6 = 384, 0.5 * 2**-8 = 2**-9, half of it ties to 0, NaN
    t = BlockTensor(
        np.array([[7, 9], [1, 9], [1, 8], [2, 2]], np.uint8), np.array([[127], [113], [112], [255]], np.uint8), MXFP4
    )
    got = fp4_row_to_fp8_col(t)
    assert got.codes[:, :4].tolist() == [[0x7C, 0x01, 0x00, 0x7F], [0xE0, 0x81, 0x80, 0x7F]]
    assert (got.codes[:, 4:] == 0).all()
    assert got.scales.tolist() == [[2.0**-6], [2.0**-6]]
    assert (got.shape, got.format, got.axis, got.source_rows) == ((2, 128), FP8_1X128, -1, 4)


@pytest.mark.parametrize("shift, want", [(5, 0x00), (2, 0x04)])
def test_the_published_transpose_that_drops_the_implicit_bit_is_not_ours(shift, want):
    # 0x0F = 1.875 * 2**-6; shifted by 5 it is below half of 2**-9; shifted by 2, 7.5 * 2**-10 ties to 4 * 2**-9
    for sign in (0x00, 0x80):
        source = BlockTensor(
            np.array([[0x0F | sign], [0x38]], np.uint8), np.array([[1.0], [2.0**shift]], np.float32), FP8_1X128
        )
        got = fp8_row_to_fp8_col(source)
        assert got.codes[0, :2].tolist() == [want | sign, 0x38]
        assert got.scales.tolist() == [[2.0**shift]]


def test_a_masked_row_of_zeros_with_scale_1_does_not_flush_its_column_block():
    codes = np.full((5, 128), 0x38, np.uint8)
    codes[2] = 0
    codes[3] = 0x80
    scales = np.full((5, 1), 2.0**-20, np.float32)
    scales[2:4] = 1.0
    got = fp8_row_to_fp8_col(BlockTensor(codes, scales, FP8_1X128))
    assert (got.scales == 2.0**-20).all()
    assert (got.codes[:, :5] == [0x38, 0x38, 0x00, 0x80, 0x38]).all()
    codes[2, 5] = 1  # one element that is not zero, and the row counts
    got = fp8_row_to_fp8_col(BlockTensor(codes, scales, FP8_1X128))
    assert (got.scales == 1.0).all()
    assert (got.codes[:, :2] == 0).all()


def test_a_row_is_masked_block_by_block():
    codes = np.zeros((2, 200), np.uint8)
    codes[0, 199], codes[1] = 0x38, 0x38
    scales = np.array([[1.0, 1.0], [2.0**-3, 2.0**-3]], np.float32)
    got = fp8_row_to_fp8_col(BlockTensor(codes, scales, FP8_1X128))
    assert (got.scales[:128] == 2.0**-3).all()  # row 0 is all zeros in the first 128 columns
    assert (got.scales[128:] == 1.0).all()


def test_zeros_alone_have_scale_1_in_FP8_and_keep_their_signs():
    codes = np.array([[0x00], [0x80]], np.uint8)
    got = fp8_row_to_fp8_col(BlockTensor(codes, np.array([[2.0**-9], [2.0**5]], np.float32), FP8_1X128))
    assert got.scales.tolist() == [[1.0]]
    assert got.codes[0, :2].tolist() == [0x00, 0x80]


def test_NaN_scales_are_left_out_of_E_and_give_0x7F():
    codes = np.full((3, 1), 0xB8, np.uint8)
    scales = np.array([[np.nan], [2.0**-4], [2.0**-4]], np.float32)
    got = fp8_row_to_fp8_col(BlockTensor(codes, scales, FP8_1X128))
    assert got.codes[0, :3].tolist() == [0x7F, 0xB8, 0xB8]
    assert got.scales.tolist() == [[2.0**-4]]
    nothing = fp8_row_to_fp8_col(BlockTensor(codes, np.full((3, 1), np.nan, np.float32), FP8_1X128))
    assert nothing.codes[0].tolist() == [0x7F] * 3 + [0] * 125
    assert nothing.scales.tolist() == [[1.0]]
    for headroom in (0, 6):
        fp4 = BlockTensor(np.full((3, 33), 10, np.uint8), np.array([[255, 100]] * 2 + [[255, 255]], np.uint8), MXFP4)
        got = fp4_row_to_fp8_col(fp4, headroom=headroom)
        assert (got.codes[:32, :3] == 0x7F).all()
        assert (got.scales[:32] == 2.0 ** (-127 - headroom)).all()
        assert (got.scales[32] == 2.0 ** (-27 - headroom)).all()
        assert (got.codes[32, 2], got.codes[32, 3]) == (0x7F, 0x00)


def test_NaN_codes_keep_their_sign():
    source = BlockTensor(np.array([[0x7F, 0xFF], [0x38, 0x38]], np.uint8), np.array([[1], [64]], np.float32), FP8_1X128)
    assert fp8_row_to_fp8_col(source).codes[:, :2].tolist() == [[0x7F, 0x38], [0xFF, 0x38]]


def test_NaN_codes_count_as_not_zero():
    source = BlockTensor(np.array([[0xFF], [0x38]], np.uint8), np.array([[2.0], [1.0]], np.float32), FP8_1X128)
    got = fp8_row_to_fp8_col(source)
    assert got.scales.tolist() == [[2.0]]
    assert got.codes[0, :2].tolist() == [0xFF, 0x30]


# ------------------------------------------------------------------------------------------------------ exhaustively
@pytest.mark.parametrize("top", [127, 0, -20])
def test_every_FP8_code_at_every_gap(top):
    gaps = np.arange(top + 149 + 1)  # down to the smallest subnormal scale
    tiles = -(-len(gaps) // 127)
    exponents = np.full((128 * tiles, 2), top)
    for i, gap in enumerate(gaps):
        exponents[128 * (i // 127) + 1 + i % 127] = top - gap
    codes = np.tile(ALL_CODES, (len(exponents), 1))
    source = BlockTensor(codes, powers_of_two(exponents), FP8_1X128)
    got = fp8_row_to_fp8_col(source)
    assert (got.scales == 2.0**top).all()
    assert_quantized_equal(got, wanted(fp8_row_to_fp8_col, source))


@pytest.mark.parametrize("headroom", range(7))
def test_every_FP4_code_at_every_gap(headroom):
    scales = np.full((128 * 3, 1), 254, np.uint8)
    for d in range(255):
        scales[128 * (d // 127) + 1 + d % 127] = 254 - d
    source = BlockTensor(np.tile(ALL_CODES[:16], (len(scales), 2)), scales, MXFP4)
    got = fp4_row_to_fp8_col(source, headroom=headroom)
    assert_quantized_equal(got, wanted(fp4_row_to_fp8_col, source, headroom))
    # The same 16 x 255 roundings as along rows, and so the same theorem:
    exact = (source.dequantize(np.float64) == got.dequantize(np.float64).T).all(axis=1)
    d = 254 - scales[:, 0].astype(int)
    assert (exact == (d <= 8 + headroom)).all()


# -------------------------------------------------------------------------------------------------- against the oracle
def test_the_table_of_columns_is_the_oracle():
    fp4, fp8 = random_fp4(131, 35, 1), random_fp8(131, 130, 1)
    for headroom in (0, 6):
        codes, exponents = columns_of(fp4.codes, exponents_of(fp4), oracle.E2M1, headroom)
        want = oracle.fp4_row_to_fp8_col(fp4.codes.tolist(), fp4.scales.tolist(), headroom)
        assert codes.tolist() == [[c for block in column for c in block.codes] for column in want]
        assert exponents.tolist() == [[block.exponent for block in column] for column in want]
    codes, exponents = columns_of(fp8.codes, exponents_of(fp8), oracle.E4M3, 0)
    given = [[None if e == NAN else e for e in row] for row in exponents_of(fp8).tolist()]
    want = oracle.fp8_row_to_fp8_col(fp8.codes.tolist(), given)
    assert codes.tolist() == [[c for block in column for c in block.codes] for column in want]
    assert exponents.tolist() == [[block.exponent for block in column] for column in want]


@BOTH
@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 255, 256, 257, 400])
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100, 128, 130, 300])
def test_any_number_of_rows_and_columns(convert, rows, columns):
    source = random_source(convert, rows, columns, rows + columns)
    got = convert(source)
    assert got.shape == (columns, -(-rows // 128) * 128)
    assert got.scales.shape == (columns, -(-rows // 128))
    assert got.source_rows == rows
    assert_quantized_equal(got, wanted(convert, source))


@BOTH
def test_any_headroom_and_larger_than_a_chunk(convert):
    source = random_source(convert, 1500, 160, 3)
    assert_quantized_equal(convert(source), wanted(convert, source))
    for headroom in range(7) if convert is fp4_row_to_fp8_col else []:
        assert_quantized_equal(convert(source, headroom=headroom), wanted(convert, source, headroom))


@BOTH
def test_columns_directly_are_columns_through_exact_values(convert):
    source = random_source(convert, 300, 96, 4)
    got = convert(source)
    values = source.dequantize(np.float64).T  # (K, m)
    by_element = got.scale_values().repeat(128, axis=1)[:, :300]
    want = encode(values / by_element, E4M3)
    want = np.where(np.isnan(values), (want & 0) + 0x7F, want)
    sign_lost = np.isnan(values) & (got.codes[:, :300] == 0xFF)  # dequantize gives every NaN a plus
    assert_codes_equal(np.where(sign_lost, 0x7F, got.codes[:, :300]), want)


# -------------------------------------------------------------------------------------------------------- padding
@BOTH
def test_padding_is_code_0(convert):
    source = random_source(convert, 130, 64, 5)
    assert (convert(source).codes[:, 130:] == 0).all()
    for t in convert(source, group_sizes=[3, 127]):
        assert (t.codes[:, t.source_rows :] == 0).all()


@BOTH
def test_E_is_taken_over_real_rows_only(convert):
    """A tail of tiny rows keeps its tiny scale: neither the padding nor the block before it has a say."""
    exponents = np.full((130, 1), 100)
    exponents[128:] = -100
    if convert is fp4_row_to_fp8_col:
        source = BlockTensor(np.full((130, 2), 7, np.uint8), (exponents + 127).astype(np.uint8), MXFP4)
    else:
        source = BlockTensor(np.full((130, 2), 0x38, np.uint8), powers_of_two(exponents), FP8_1X128)
    headroom = 6 if convert is fp4_row_to_fp8_col else 0
    got = convert(source)
    assert got.scales.tolist() == [[2.0 ** (100 - headroom), 2.0 ** (-100 - headroom)]] * 2
    assert (got.codes[:, 128] == got.codes[:, 0]).all()


@BOTH
def test_a_permutation_of_the_rows_of_a_block_permutes_its_columns(convert):
    source = random_source(convert, 128, 64, 6)
    order = np.random.default_rng(6).permutation(128)
    moved = BlockTensor(source.codes[order], source.scales[order], source.format)
    assert_codes_equal(convert(moved).codes, convert(source).codes[:, order])
    assert_floats_equal(convert(moved).scales, convert(source).scales)


# ------------------------------------------------------------------------------------------------------------ ragged
@BOTH
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize("columns", [33, 128, 160])
def test_each_group_is_converted_alone(convert, sizes, columns):
    source = random_source(convert, sum(sizes), columns, len(sizes))
    got = convert(source, group_sizes=sizes)
    assert isinstance(got, list)
    assert len(got) == len(sizes)
    start = 0
    for t, size in zip(got, sizes, strict=True):
        part = rows_of(source, start, size)
        assert t.source_rows == size
        assert t.shape == (columns, -(-size // 128) * 128)
        assert_tensors_equal(t, convert(part))
        assert_quantized_equal(t, wanted(convert, part))
        start += size


@BOTH
def test_one_group_is_the_dense_form(convert):
    source = random_source(convert, 300, 64, 7)
    (only,) = convert(source, group_sizes=[300])
    assert_tensors_equal(only, convert(source))


@BOTH
def test_groups_come_as_lists_tuples_arrays_and_tensors(convert):
    source = random_source(convert, 10, 32, 8)
    want = convert(source, group_sizes=[3, 7])
    torch = pytest.importorskip("torch")
    for sizes in ((3, 7), np.array([3, 7], np.int32), np.array([3, 7], np.uint64), torch.tensor([3, 7])):
        for got, expected in zip(convert(source, group_sizes=sizes), want, strict=True):
            assert_tensors_equal(got, expected)


@BOTH
def test_no_rows_and_no_groups(convert):
    source = random_source(convert, 0, 64)
    empty = convert(source)
    assert (empty.shape, empty.scales.shape, empty.source_rows) == ((64, 0), (64, 0), 0)
    assert convert(source, group_sizes=[]) == []
    assert [t.shape for t in convert(source, group_sizes=[0, 0])] == [(64, 0), (64, 0)]
    no_columns = convert(random_source(convert, 5, 0))
    assert (no_columns.shape, no_columns.scales.shape) == ((0, 128), (0, 1))


@BOTH
@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ([5, 6], ValueError, "group_sizes sum to 11, needed 10, the rows of t"),
        ([], ValueError, "group_sizes sum to 0, needed 10"),
        ([11, -1], ValueError, "group_sizes holds -1, needed sizes of 0 or more"),
        ([5.0, 5.0], TypeError, "group_sizes is float64 of shape"),
        ([[5, 5]], TypeError, r"group_sizes is int64 of shape \(1, 2\), needed a list of integers"),
        (10, TypeError, r"group_sizes is int64 of shape \(\)"),
        ([True] * 10, TypeError, "group_sizes is bool"),
        (["10"], TypeError, "group_sizes is <U2"),
        ([2**63, 2**63 + 10], ValueError, "group_sizes sum to 18446744073709551626, needed 10"),
    ],
    ids=str,
)
def test_group_sizes_that_do_not_fit_are_refused(convert, sizes, error, message):
    with pytest.raises(error, match=f"{convert.__name__}: {message}"):
        convert(random_source(convert, 10, 32), group_sizes=sizes)


# ------------------------------------------------------------------------------------------------------------ shapes
@BOTH
def test_leading_axes_are_flattened_into_rows(convert):
    flat = random_source(convert, 30, 64, 9)
    source = BlockTensor(flat.codes.reshape(2, 5, 3, 64), flat.scales.reshape(2, 5, 3, -1), flat.format)
    assert_tensors_equal(convert(source), convert(flat))
    for got, want in zip(convert(source, group_sizes=[4, 26]), convert(flat, group_sizes=[4, 26]), strict=True):
        assert_tensors_equal(got, want)
    vector = BlockTensor(flat.codes[0], flat.scales[0], flat.format)
    assert_tensors_equal(convert(vector), convert(rows_of(flat, 0, 1)))


def test_FP4_columns_hold_the_values_of_FP4_rows_within_the_lossless_window():
    rng = np.random.default_rng(10)
    for headroom in range(7):
        scales = rng.integers(100, 100 + 9 + headroom, (256, 4)).astype(np.uint8)  # spread at most 8 + headroom
        source = BlockTensor(rng.integers(0, 16, (256, 128)).astype(np.uint8), scales, MXFP4)
        values = source.dequantize(np.float64)
        assert_floats_equal(fp4_row_to_fp8_col(source, headroom=headroom).dequantize(np.float64), values.T)
        assert_floats_equal(fp4_row_to_fp8_row(source, headroom=headroom).dequantize(np.float64), values)


def test_transposing_FP8_twice_with_equal_scales_is_identity():
    rng = np.random.default_rng(11)
    codes = rng.integers(0, 256, (256, 128)).astype(np.uint8)
    source = BlockTensor(codes, np.full((256, 1), 0.25, np.float32), FP8_1X128)
    there = fp8_row_to_fp8_col(source)
    assert_codes_equal(there.codes, codes.T)
    back = fp8_row_to_fp8_col(BlockTensor(there.codes, there.scales, FP8_1X128))
    assert_codes_equal(back.codes, codes)
    assert_floats_equal(back.scales.repeat(1, axis=1), np.full((256, 1), 0.25, np.float32))


def test_quantized_BF16_weights_and_gradients_transpose_as_the_oracle_says():
    rng = np.random.default_rng(12)
    x = (rng.standard_normal((40, 40)) * 2.0 ** rng.integers(-20, 1, (40, 1))).astype(np.float32)
    x[3], x[5, 2] = 0, np.nan
    fp4, fp8 = quantize(x, MXFP4), quantize(x, FP8_1X128)
    assert_quantized_equal(fp4_row_to_fp8_col(fp4), wanted(fp4_row_to_fp8_col, fp4))
    assert_quantized_equal(fp8_row_to_fp8_col(fp8), wanted(fp8_row_to_fp8_col, fp8))
