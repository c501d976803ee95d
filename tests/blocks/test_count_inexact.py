"""count_inexact counts the elements whose value a conversion changed."""

from fractions import Fraction

import numpy as np
import pytest

from mxsim.blocks import (
    FP8_1X128,
    MXFP4,
    BlockTensor,
    ScaleRule,
    count_inexact,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_row_to_fp4_row,
    fp8_row_to_fp8_col,
    quantize,
)
from tests import oracle
from tests.blocks.pairs import random_fp4, random_fp8
from tests.oracle import TWO

ELEMENTS = {"E2M1": oracle.E2M1, "E4M3": oracle.E4M3}


def value(t: BlockTensor, row: int, column: int) -> Fraction | None:
    """Exact value of one element of a matrix of blocks along rows; None: NaN."""
    n = oracle.decode(int(t.codes[row, column]), ELEMENTS[t.format.element.name])
    scale = t.scales[row, column // t.format.block_size]
    if n.kind == "nan" or scale != scale or (t.format is MXFP4 and scale == 0xFF):
        return None
    factor = TWO ** (int(scale) - 127) if t.format is MXFP4 else Fraction(float(scale))
    return n.value * factor


def brute_force(source: BlockTensor, result: BlockTensor | list[BlockTensor]) -> int:
    rows, columns = source.shape
    count = 0
    if isinstance(result, BlockTensor) and result.source_rows is None:
        return sum(value(source, r, k) != value(result, r, k) for r in range(rows) for k in range(columns))
    start = 0
    for t in [result] if isinstance(result, BlockTensor) else result:
        for r in range(t.source_rows):
            count += sum(value(source, start + r, k) != value(t, k, r) for k in range(columns))
        start += t.source_rows
    assert start == rows
    return count


def test_by_hand():
    # three blocks within 2**8 of the largest, one 2**9 below: of its codes 0.5 (twice) and 1.5 (once) lose a bit
    codes = np.zeros((1, 128), np.uint8)
    codes[0, :4] = 1, 3, 2, 9
    codes[0, 32:96] = 1
    source = BlockTensor(codes, np.array([[100, 109, 101, 100]], np.uint8), MXFP4)
    assert count_inexact(source, fp4_row_to_fp8_row(source, headroom=0)) == 3
    assert count_inexact(source, fp4_row_to_fp8_row(source, headroom=1)) == 0


@pytest.mark.parametrize("headroom", [0, 3, 6])
def test_FP4_results_against_brute_force(headroom):
    source = random_fp4(70, 45, headroom)
    results = [
        fp4_row_to_fp8_row(source, headroom=headroom),
        fp4_row_to_fp8_col(source, headroom=headroom),
        fp4_row_to_fp8_col(source, headroom=headroom, group_sizes=[0, 69, 1, 0]),
    ]
    counts = [count_inexact(source, result) for result in results]
    assert counts == [brute_force(source, result) for result in results]
    assert all(type(c) is int and c > 0 for c in counts)


def test_FP8_results_against_brute_force():
    source = random_fp8(40, 135, 1)
    results = [
        *(fp8_row_to_fp4_row(source, scale_rule=rule) for rule in (ScaleRule.FLOOR, ScaleRule.CEIL)),
        fp8_row_to_fp8_col(source),
        fp8_row_to_fp8_col(source, group_sizes=[20, 0, 20]),
    ]
    assert [count_inexact(source, result) for result in results] == [brute_force(source, r) for r in results]


def test_a_square_tells_rows_from_columns():
    """128 x 128: row result and column result have one shape, and another count."""
    rng = np.random.default_rng(2)
    scales = np.zeros((128, 4), np.uint8)
    scales[...] = 127 - 12 * (np.arange(128) % 2)[:, None]  # rows agree within themselves, columns do not
    source = BlockTensor(rng.integers(0, 16, (128, 128)).astype(np.uint8), scales, MXFP4)
    row, column = fp4_row_to_fp8_row(source, headroom=0), fp4_row_to_fp8_col(source, headroom=0)
    assert row.shape == column.shape
    assert count_inexact(source, row) == 0
    assert count_inexact(source, column) == brute_force(source, column) > 1000
    transposed = BlockTensor(np.ascontiguousarray(row.codes.T), np.repeat(row.scales, 1, axis=1), FP8_1X128)
    assert count_inexact(source, transposed) > 1000  # not a column result: nothing says that it is transposed


def test_FP8_square_against_brute_force():
    source = random_fp8(128, 128, 3)
    assert count_inexact(source, fp8_row_to_fp8_col(source)) == brute_force(source, fp8_row_to_fp8_col(source))


def test_NaN_equals_NaN_and_zeros_of_both_signs_are_equal():
    source = BlockTensor(np.array([[7, 8, 0]], np.uint8), np.array([[0xFF]], np.uint8), MXFP4)
    assert count_inexact(source, fp4_row_to_fp8_row(source)) == 0
    signs = BlockTensor(np.array([[0, 8]], np.uint8), np.array([[1]], np.uint8), MXFP4)
    other = BlockTensor(np.array([[8, 0]], np.uint8), np.array([[200]], np.uint8), MXFP4)
    assert count_inexact(signs, other) == 0
    poisoned = BlockTensor(signs.codes, np.array([[0xFF]], np.uint8), MXFP4)
    assert count_inexact(signs, poisoned) == 2


def test_an_element_that_vanishes_below_float32_is_counted():
    source = BlockTensor(np.array([[1, 7]], np.uint8), np.array([[0]], np.uint8), MXFP4)
    flushed = BlockTensor(np.array([[0, 7]], np.uint8), np.array([[0]], np.uint8), MXFP4)
    assert count_inexact(source, flushed) == 1
    tiny = BlockTensor(np.array([[1]], np.uint8), np.array([[2.0**-149]], np.float32), FP8_1X128)  # 2**-158
    assert count_inexact(tiny, fp8_row_to_fp8_col(tiny)) == 0
    assert count_inexact(tiny, fp8_row_to_fp4_row(tiny)) == 1


def test_padding_is_not_counted():
    source = random_fp4(1, 64, 4, nan_share=0)
    result = fp4_row_to_fp8_col(source)
    broken = BlockTensor(result.codes | (np.arange(128) > 0).astype(np.uint8), result.scales, FP8_1X128, source_rows=1)
    assert count_inexact(source, broken) == count_inexact(source, result)


def test_leading_axes_are_rows():
    flat = random_fp4(30, 64, 5)
    source = BlockTensor(flat.codes.reshape(5, 6, 64), flat.scales.reshape(5, 6, 2), MXFP4)
    for convert in (fp4_row_to_fp8_row, fp4_row_to_fp8_col):
        assert count_inexact(source, convert(source)) == count_inexact(flat, convert(flat))


@pytest.mark.parametrize("shape", [(0, 64), (5, 0)], ids=str)
def test_nothing_is_exact(shape):
    source = quantize(np.zeros(shape), MXFP4)
    assert count_inexact(source, fp4_row_to_fp8_row(source)) == 0
    assert count_inexact(source, fp4_row_to_fp8_col(source)) == 0
    assert count_inexact(source, fp4_row_to_fp8_col(source, group_sizes=[0, shape[0]])) == 0


def test_the_result_of_another_source_is_refused():
    source, other = random_fp4(10, 64), random_fp4(11, 64)
    with pytest.raises(ValueError, match=r"count_inexact: result has shape \(11, 64\), needed \(10, 64\)"):
        count_inexact(source, fp4_row_to_fp8_row(other))
    with pytest.raises(ValueError, match=r"count_inexact: result holds 11 source rows .* needed 10 rows of 64"):
        count_inexact(source, fp4_row_to_fp8_col(other))
    with pytest.raises(ValueError, match=r"count_inexact: result holds 10 source rows .* needed 10 rows of 64"):
        count_inexact(source, fp4_row_to_fp8_col(random_fp4(10, 32)))
    with pytest.raises(ValueError, match="count_inexact: result holds 4 source rows"):
        count_inexact(source, fp4_row_to_fp8_col(source, group_sizes=[4, 6])[:1])
    with pytest.raises(ValueError, match="count_inexact: result holds 0 source rows"):
        count_inexact(source, [fp4_row_to_fp8_row(source)])


def test_what_is_no_BlockTensor_is_refused():
    source = random_fp4(2, 32)
    with pytest.raises(TypeError, match="count_inexact: source is a ndarray, needed a BlockTensor"):
        count_inexact(np.ones((2, 32)), source)
    for bad in (np.ones((2, 32)), [np.ones(3)], None, 3):
        with pytest.raises(TypeError, match=r"count_inexact: result .*needed"):
            count_inexact(source, bad)
