"""Errors are those of their definitions; which ways round, and from which spread on, is as NUMERICS 5 has it."""

import ml_dtypes
import numpy as np
import pytest

from mxsim.analysis.row_to_column import (
    Break,
    RowToColumn,
    RowToColumnRow,
    breaks,
    column_spread,
    columns_by,
    lognormal_rows,
    measured_sigma_octaves,
    normal_gradient,
    study_rows_to_columns,
)
from mxsim.blocks import MXFP4, MXFP8_E4M3, BlockTensor, fp8_gemm, quantize

FP4_WAYS = [way for way in RowToColumn if way.name.startswith("FP4")]
FP8_WAYS = [way for way in RowToColumn if way.name.startswith("FP8")]
FRESH = [way for way in RowToColumn if "FRESH" in way.name]


def tokens(spread: int) -> np.ndarray:
    """128 tokens of every E2M1 value, one 2**spread below the others; FLOOR gives them the scales 1 and 2**-spread."""
    x = np.tile([0.5, -1, 1.5, -2, 3, -4, 6, 0], (128, 4)).astype(np.float64)
    x[1] *= 2.0**-spread
    return x


def by_way(x: np.ndarray, **options) -> dict[RowToColumn, RowToColumnRow]:
    rows = study_rows_to_columns("test", x, normal_gradient((x.shape[0], 8)), **options)
    return {row.way: row for row in rows}


# ---------------------------------------------------------------------------------------------------------- the ways
@pytest.mark.parametrize("way", RowToColumn)
def test_columns_hold_tokens_along_k_and_the_padding_is_zero(way):
    x = lognormal_rows((200, 64), 0.5)
    source, columns = columns_by(way, x)
    assert (source.shape, columns.shape, columns.source_rows) == ((200, 64), (64, 256), 200)
    values = columns.dequantize(np.float64)
    assert (values[:, 200:] == 0).all()
    assert np.abs(values[:, :200].T - source).max() < 0.07 * np.abs(source).max()


def test_what_each_way_starts_from():
    x = lognormal_rows((128, 64), 1)
    fp4 = quantize(x, MXFP4).dequantize(np.float64)
    for way in FP4_WAYS:
        assert np.array_equal(columns_by(way, x)[0], fp4)
    for way in FP8_WAYS:
        source, _ = columns_by(way, x)
        assert 0.02 < np.linalg.norm(source - x) / np.linalg.norm(x) < 0.03
    assert np.array_equal(columns_by(RowToColumn.BF16_FRESH_AMAX, x)[0], x)
    odd = x * (1 + 2**-12)  # no longer BF16
    assert np.array_equal(
        columns_by(RowToColumn.BF16_FRESH_AMAX, odd)[0], odd.astype(ml_dtypes.bfloat16).astype(np.float64)
    )


@pytest.mark.parametrize("way", FRESH)
def test_a_new_amax_is_rounded_as_ml_dtypes_has_it(way):
    """Scale: the smallest power of two that brings amax to at most 448, or 1 / (448 / amax) in FP32."""
    source, columns = columns_by(way, lognormal_rows((256, 32), 1.5))
    blocks = source.T.reshape(32, 2, 128)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    if way.name.endswith("FP32"):
        factor = np.float32(448) / amax.astype(np.float32)
        scaled, scale = blocks.astype(np.float32) * factor, (np.float32(1) / factor).astype(np.float64)
    else:
        scale = np.ones_like(amax)
        for step in (2.0, 0.5):
            while (mask := (amax > 448 * scale) if step > 1 else (amax <= 448 * scale * step)).any():
                scale[mask] *= step
        scaled = blocks / scale
    expected = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    assert np.array_equal(columns.dequantize(np.float64).reshape(blocks.shape), expected)


# ---------------------------------------------------------------------------------------------- which rounds, and when
@pytest.mark.parametrize(
    "way, window",
    [
        (RowToColumn.FP4_DIRECT, 14),
        (RowToColumn.FP4_DIRECT_H0, 8),
        (RowToColumn.FP4_FRESH_AMAX, 14),
        (RowToColumn.FP4_VIA_FP8_ROWS, 14),
    ],
)
def test_exact_to_the_edge_of_the_window_and_not_beyond(way, window):
    """The new amax follows each column's own largest value, so the columns of 0.5 and 1.5 have a wider window."""
    inside, outside = by_way(tokens(window), ways=[way])[way], by_way(tokens(window + 1), ways=[way])[way]
    assert inside.max_spread == window
    assert inside.inexact == inside.conversion_error == inside.worst_token_error == inside.wgrad_conversion_error == 0
    share = 2 / 8 / 128  # 0.5 and 1.5 of one token
    assert outside.inexact == pytest.approx(0 if way is RowToColumn.FP4_FRESH_AMAX else share, rel=1e-5)


def test_the_published_transpose_loses_the_implicit_bit_where_ours_rounds():
    spread = 13  # exact for every code by rounding; the least are subnormal in FP8
    rows = by_way(tokens(spread), ways=[RowToColumn.FP4_VIA_FP8_ROWS, RowToColumn.FP4_VIA_FP8_ROWS_PUBLISHED])
    assert rows[RowToColumn.FP4_VIA_FP8_ROWS].inexact == 0
    assert rows[RowToColumn.FP4_VIA_FP8_ROWS_PUBLISHED].worst_token_error > 0.1


def test_fp32_scales_round_nearly_everything_a_second_time_at_any_spread():
    for sigma in (0, 1, 2):
        rows = by_way(lognormal_rows((256, 64), sigma))
        assert rows[RowToColumn.FP4_FRESH_AMAX_FP32].inexact > 0.7
        assert rows[RowToColumn.FP8_FRESH_AMAX_FP32].inexact > 0.7
        assert 0.02 < rows[RowToColumn.FP4_FRESH_AMAX_FP32].wgrad_balanced_error < 0.03
        assert rows[RowToColumn.FP4_FRESH_AMAX].inexact == rows[RowToColumn.FP4_DIRECT].inexact == 0


def test_a_spread_that_leaves_fp4_exact_rounds_fp8():
    rows = by_way(lognormal_rows((256, 64), 2))
    assert rows[RowToColumn.FP4_DIRECT].max_spread > 8
    assert rows[RowToColumn.FP4_DIRECT].inexact == 0
    for way in FP8_WAYS:
        assert rows[way].inexact > 0
    assert rows[RowToColumn.FP8_PUBLISHED].worst_token_error > 5 * rows[RowToColumn.FP8_TRANSPOSE].worst_token_error


# ------------------------------------------------------------------------------------------------------------ errors
def test_every_error_is_that_of_its_definition():
    x, dy = lognormal_rows((256, 64), 3), normal_gradient((256, 16))
    for row in study_rows_to_columns("test", x, dy, with_fp8_gemm=True):
        source, columns = columns_by(row.way, x)
        result = columns.dequantize(np.float64).T

        def error(a, b):
            return pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), rel=1e-5)

        assert row.inexact == pytest.approx((result != source).mean(), rel=1e-5)
        assert row.conversion_error == error(result, source)
        assert row.total_error == error(result, x)
        per_token = [np.linalg.norm(r - s) / np.linalg.norm(s) for r, s in zip(result, source, strict=True)]
        assert row.worst_token_error == pytest.approx(max(per_token), rel=1e-5)
        assert row.wgrad_conversion_error == error(result.T @ dy, source.T @ dy)
        assert row.wgrad_total_error == error(result.T @ dy, x.T @ dy)
        rms = np.sqrt(np.square(x).mean(axis=1, keepdims=True))
        scale = np.array([[next(2.0**e for e in range(-60, 60) if r < 2.0**e)] for r in rms])
        assert row.wgrad_balanced_error == error(result.T @ (dy / scale), source.T @ (dy / scale))
        dy_columns = columns_by(RowToColumn.BF16_FRESH_AMAX, dy)[1]
        assert row.wgrad_fp8_error == error(fp8_gemm(columns, dy_columns).astype(np.float64), x.T @ dy)


def test_tokens_of_zeros_are_no_error():
    x = tokens(0)
    x[5] = 0
    assert by_way(x, ways=[RowToColumn.FP4_DIRECT])[RowToColumn.FP4_DIRECT].worst_token_error == 0


def test_the_rows_name_data_way_and_spread():
    x = lognormal_rows((256, 64), 2)
    rows = list(study_rows_to_columns("some data", x, normal_gradient((256, 8)), sigma_octaves=2))
    assert [(row.data, row.way, row.sigma_octaves) for row in rows] == [("some data", way, 2) for way in RowToColumn]
    assert {row.wgrad_fp8_error for row in rows} == {None}
    measured = by_way(x, ways=[RowToColumn.FP4_DIRECT])[RowToColumn.FP4_DIRECT].sigma_octaves
    assert measured == pytest.approx(2, abs=0.25)


# -------------------------------------------------------------------------------------------------------------- data
def test_rows_have_the_spread_that_they_were_drawn_with():
    x = lognormal_rows((4096, 64), 1.5)
    assert np.array_equal(x, x.astype(ml_dtypes.bfloat16).astype(np.float64))
    assert measured_sigma_octaves(x) == pytest.approx(1.5, abs=0.06)
    assert measured_sigma_octaves(lognormal_rows((4096, 64), 0)) < 0.15  # of a mean of 64 squares
    logs = [np.log2(np.abs(lognormal_rows((50, 32), sigma)[:, 0])) for sigma in (0, 1, 2)]
    assert logs[2] - logs[1] == pytest.approx(logs[1] - logs[0], abs=0.02)  # the same z


def test_the_measured_spread_of_rows_a_known_factor_apart_at_any_size():
    rows = np.array([[1.0, -1.0], [4.0, 4.0], [0.0, 0.0]])
    for size in (1.0, 2.0**1000, 2.0**-1000):
        assert measured_sigma_octaves(rows * size) == 1.0


def test_column_spread_is_the_largest_of_all_column_blocks():
    t = quantize(lognormal_rows((300, 96), 3), MXFP4)
    exponents = t.scales.astype(int)
    spreads = [np.ptp(exponents[start : start + 128, block]) for start in (0, 128, 256) for block in range(3)]
    assert column_spread(t) == max(spreads)
    x = np.ones((128, 64))
    x[3, :32], x[4, 0], x[5, 32:] = 0, np.nan, 2.0**-9
    assert column_spread(quantize(x, MXFP4)) == 9
    nan_scale = BlockTensor(np.ones((2, 32), np.uint8), np.array([[0xFF], [100]], np.uint8), MXFP4)
    assert column_spread(nan_scale) == 0


def row(way, sigma, inexact, worst):
    return RowToColumnRow("test", way, sigma, 0, inexact, 0, 0, worst, 0, worst / 10, 0, None)


def test_a_way_breaks_where_it_first_rounds_and_where_an_error_passes_the_level():
    rows = [row(RowToColumn.FP4_DIRECT, sigma, 0.001 * (sigma > 2), sigma / 100) for sigma in (3, 1, 2, 4, 0)]
    rows += [row(RowToColumn.FP8_TRANSPOSE, sigma, 0, 0) for sigma in (0, 1)]
    assert breaks(rows, level=0.015) == [
        Break(RowToColumn.FP4_DIRECT, 3, 2),
        Break(RowToColumn.FP8_TRANSPOSE, None, None),
    ]
    assert breaks(rows, level=0.0035, error="wgrad_balanced_error")[0] == Break(RowToColumn.FP4_DIRECT, 3, 4)


# --------------------------------------------------------------------------------------------------------- bad input
X = np.ones((4, 32))


@pytest.mark.parametrize(
    "error, message, x, dy",
    [
        (TypeError, "x has the dtype int64", X.astype(np.int64), X),
        (TypeError, "dy has the dtype int8", X, X.astype(np.int8)),
        (ValueError, r"x has the shape \(4,\), needed a matrix", X[:, 0], X),
        (ValueError, r"x has the shape \(0, 32\)", X[:0], X),
        (ValueError, "x holds 128 NaNs", X * np.nan, X),
        (ValueError, "dy holds 128 NaNs or infinities", X, X * np.inf),
        (ValueError, "dy has 3 rows, needed 4, the tokens of x", X, X[:3]),
        (ValueError, "x holds only zeros", 0 * X, X),
        (ValueError, "dy holds only zeros", X, 0 * X),
    ],
)
def test_the_study_refuses(error, message, x, dy):
    with pytest.raises(error, match=f"^study_rows_to_columns: {message}"):
        list(study_rows_to_columns("test", x, dy))


def test_the_others_refuse():
    with pytest.raises(TypeError, match=r"^columns_by: way is 'FP4_DIRECT', needed a RowToColumn"):
        columns_by("FP4_DIRECT", X)
    with pytest.raises(TypeError, match=r"^column_spread: t is a ndarray, needed a BlockTensor"):
        column_spread(X)
    for bad in (X * np.nan, X[:, :0], X[0]):
        with pytest.raises(ValueError, match=r"^measured_sigma_octaves: x "):
            measured_sigma_octaves(bad)
    with pytest.raises(TypeError, match=r"^measured_sigma_octaves: x has the dtype int64"):
        measured_sigma_octaves(X.astype(np.int64))
    with pytest.raises(ValueError, match=r"^column_spread: t is MXFP8_E4M3 of 2 axes, needed MXFP4"):
        column_spread(quantize(X, MXFP8_E4M3))
    with pytest.raises(ValueError, match=r"^column_spread: t is MXFP4 of 1 axes"):
        column_spread(quantize(X[0], MXFP4))
    with pytest.raises(ValueError, match=r"^column_spread: t holds only zeros"):
        column_spread(quantize(0 * X, MXFP4))
    for sigma in (-1, 21, np.nan):
        with pytest.raises(ValueError, match=r"^lognormal_rows: sigma_octaves is .*, needed 0 to 20"):
            lognormal_rows((4, 32), sigma)
    with pytest.raises(ValueError, match=r"^breaks: rows is empty"):
        breaks([])
    some = [row(RowToColumn.FP4_DIRECT, 0, 0, 0)]
    with pytest.raises(ValueError, match=r"^breaks: error is 'nonsense', needed one of conversion_error, total_error"):
        breaks(some, error="nonsense")
    with pytest.raises(ValueError, match=r"^breaks: level is 0"):
        breaks(some, level=0)
