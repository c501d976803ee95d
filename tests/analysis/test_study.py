"""The study of a file is the study of its whole tensors, however they are cut into pieces."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from mxsim.analysis import ErrorSums, exponent_spread, is_lossless, study_arrays, study_file
from mxsim.analysis.study import _MAX_THREADS, Study, StudyRow
from mxsim.blocks import (
    BLOCK_FORMATS,
    FP8_1X128,
    FP8_128X1,
    FP8_128X128,
    MXFP4,
    MXINT8,
    NVFP4,
    ScaleRule,
    fp4_row_to_fp8_row,
    quantize,
)

FORMATS = list(BLOCK_FORMATS.values())


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * np.exp(4 * random.standard_normal((*shape[:-1], 1)))
    x[random.random(shape) < 0.1] = 0
    return x.astype(np.float32)


def same(a: Study, b: Study) -> None:
    """Bit for bit, NaN equal to NaN."""
    for rows, others in ((a.rows, b.rows), (a.totals, b.totals)):
        assert [repr(dataclasses.astuple(row)) for row in rows] == [repr(dataclasses.astuple(row)) for row in others]
    assert a.skipped == b.skipped


# --------------------------------------------------------------------------------------------------- chunks and whole
SHAPES = [
    (5,),
    (1000,),
    (30_001,),
    (3, 40),
    (150, 700),
    (129, 1025),
    (4, 130, 300),
    (70, 1, 33),
    (2, 3, 5, 64),
    (900, 3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_do_not_depend_on_the_chunk(shape):
    x = values(shape)
    whole = study_arrays({"x": x}, formats=FORMATS, chunk=2**40)
    for chunk in (1, 2**14, 100_000):
        same(study_arrays({"x": x}, formats=FORMATS, chunk=chunk), whole)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_results_do_not_depend_on_the_chunk_along_any_axis(axis):
    x = values((131, 20, 30))
    formats = [MXFP4, NVFP4, FP8_1X128, MXINT8, FP8_128X128]
    same(
        study_arrays({"x": x}, formats=formats, axis=axis, chunk=2**10),
        study_arrays({"x": x}, formats=formats, axis=axis, chunk=2**40),
    )


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch):
    x = values((600, 700))
    whole = study_arrays({"x": x}, chunk=2**14)
    assert _MAX_THREADS > 1
    monkeypatch.setattr("mxsim.analysis.study._MAX_THREADS", 1)
    same(study_arrays({"x": x}, chunk=2**14), whole)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(
    "shape, axis", [((3, 150), -1), ((150, 3), 0), ((2, 140, 130), -2), ((20, 6, 7), 0), ((200,), -1)]
)
def test_each_row_is_the_error_of_the_whole_quantized_tensor(fmt, shape, axis):
    x = values(shape)
    study = study_arrays({"x": x}, formats=[fmt], axis=axis, chunk=1)
    if study.skipped:
        assert len(shape) == 1
        return
    has_own_axis = fmt in (FP8_128X1, FP8_128X128)
    t = quantize(x, fmt, axis=None if has_own_axis else axis)
    sums = ErrorSums()
    sums.add(x, t)
    (row,) = study.rows
    assert row.num_elements == x.size
    for name in ("sqnr_db", "max_relative_error", "mean_relative_error", "saturated", "underflowed", "subnormal"):
        assert getattr(row, name) == pytest.approx(getattr(sums, name), rel=1e-12, nan_ok=True), name
    if fmt is MXFP4:
        spread = exponent_spread(t)
        assert row.max_spread == spread.max()
        assert row.num_groups == spread.size
        assert row.spread_counts == tuple(np.bincount(spread[spread >= 0]).tolist())
        assert row.p99_spread == np.sort(spread[spread >= 0])[math.ceil(0.99 * (spread >= 0).sum()) - 1]
        for headroom in (0, 6):
            assert getattr(row, f"lossless_h{headroom}") == is_lossless(t, headroom=headroom).mean()
    else:
        assert row.num_groups == 0
        assert math.isnan(row.max_spread)


def test_lossless_share_is_that_of_the_conversion():
    x = values((64, 512)) * np.exp2(np.random.default_rng(1).integers(-20, 1, (64, 16)).repeat(32, axis=1))
    (row,) = study_arrays({"x": x}, formats=[MXFP4]).rows
    t = quantize(x, MXFP4)
    for headroom, share in ((0, row.lossless_h0), (6, row.lossless_h6)):
        changed = t.dequantize() != fp4_row_to_fp8_row(t, headroom=headroom).dequantize()
        assert share == 1 - changed.reshape(64, 4, 128).any(axis=2).mean()
        assert 0 < share < 1


def test_an_nvfp4_scale_is_that_of_the_whole_tensor():
    x = values((100, 600))
    x[99, 599] = 1e4  # the last piece holds the largest element
    (row,) = study_arrays({"x": x}, formats=[NVFP4], chunk=1).rows
    q = quantize(x, NVFP4).dequantize(np.float64)
    assert row.sqnr_db == pytest.approx(10 * math.log10((x.astype(float) ** 2).sum() / ((q - x) ** 2).sum()), rel=1e-12)


def test_normal_data_reach_the_known_sqnr():
    x = np.random.default_rng(0).standard_normal((20_000, 32)).astype(np.float32)
    study = study_arrays({"x": x}, formats=[MXFP4], scale_rules=list(ScaleRule))
    for row, expected in zip(study.rows, (18.79, 18.76, 16.83, 19.03), strict=True):
        assert row.sqnr_db == pytest.approx(expected, abs=0.05), row.scale_rule


# ------------------------------------------------------------------------------------------------ what rows there are
def keys(rows: list[StudyRow]) -> list[tuple[str, str, str | None]]:
    return [(row.tensor, row.format, row.scale_rule) for row in rows]


def test_rules_are_tried_on_formats_that_have_one():
    study = study_arrays(
        {"x": np.ones(3)}, formats=[MXFP4, NVFP4, MXFP4], scale_rules=[ScaleRule.EVEN, ScaleRule.CEIL, ScaleRule.EVEN]
    )
    assert keys(study.rows) == [("x", "MXFP4", "EVEN"), ("x", "MXFP4", "CEIL"), ("x", "NVFP4", None)]


def test_without_rules_each_format_has_its_own():
    study = study_arrays({"x": np.ones((2, 3))}, formats=[MXFP4, NVFP4, FP8_128X128])
    assert keys(study.rows) == [("x", "MXFP4", "FLOOR"), ("x", "NVFP4", None), ("x", "FP8_128X128", "RCEIL")]


def test_totals_are_over_all_tensors():
    arrays = {"a": values((40, 70)), "b": values((300,), 1)}
    study = study_arrays(arrays, formats=[MXFP4])
    (total,) = study.totals
    parts = [quantize(x, MXFP4) for x in arrays.values()]
    signal = sum((x.astype(float) ** 2).sum() for x in arrays.values())
    noise = sum(((t.dequantize(np.float64) - x) ** 2).sum() for x, t in zip(arrays.values(), parts, strict=True))
    assert total.num_elements == 3100
    assert total.sqnr_db == pytest.approx(10 * math.log10(signal / noise), rel=1e-12)
    assert total.num_groups == sum(row.num_groups for row in study.rows)
    assert sum(total.spread_counts) == sum(sum(row.spread_counts) for row in study.rows)


def test_what_cannot_be_studied_is_skipped_with_its_reason():
    arrays = {
        "int": np.arange(3),
        "bool": np.ones(3, bool),
        "empty": np.zeros((0, 4)),
        "flat": np.ones(4),
        "scalar": np.float64(3.25),
    }
    study = study_arrays(arrays, formats=[MXFP4, FP8_128X1])
    assert keys(study.rows) == [("flat", "MXFP4", "FLOOR"), ("scalar", "MXFP4", "FLOOR")]
    assert study.rows[1].shape == ()
    skipped = {(entry.tensor, entry.format): entry.reason for entry in study.skipped}
    assert skipped["int", None] == "int64: not floating-point"
    assert skipped["bool", None] == "bool: not floating-point"
    assert skipped["empty", None] == "no elements"
    assert "1 axes" in skipped["flat", "FP8_128X1"]
    assert len(skipped) == 5


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ">f4"]
)
def test_every_dtype_is_studied_by_its_exact_values(dtype):
    x = np.random.default_rng(0).standard_normal((10, 64)).astype(dtype)
    rows = study_arrays({"x": x}).rows
    for row, other in zip(rows, study_arrays({"x": x.astype(np.float64)}).rows, strict=True):
        assert row.dtype == str(x.dtype)
        assert row.sqnr_db == other.sqnr_db


def test_nan_and_infinity_poison_their_block_only():
    x = values((4, 128))
    clean = study_arrays({"x": np.delete(x, np.s_[32:64], axis=1)}, formats=[MXFP4]).rows[0]
    x[:, 40], x[:, 41] = np.nan, np.inf
    (row,) = study_arrays({"x": x}, formats=[MXFP4]).rows
    assert row.num_poisoned_blocks == 4
    assert row.num_elements == x.size
    assert row.sqnr_db == pytest.approx(clean.sqnr_db, rel=1e-12)


def test_signalling_nans_pass_without_a_warning():
    x = np.full((2, 40), 0x7F800001, np.uint32).view(np.float32)
    y = np.full((2, 40), 0x7FF0000000000001, np.uint64).view(np.float64)
    for row in study_arrays({"x": x, "y": y}, formats=[MXFP4, MXINT8]).rows:
        assert row.num_poisoned_blocks == 4
        assert math.isnan(row.sqnr_db)


def test_progress_ends_at_what_there_is_to_do():
    calls = []
    study_arrays({"x": values((300, 700)), "i": np.arange(3)}, progress=lambda *call: calls.append(call), chunk=2**14)
    assert calls[0] == (0, 300 * 700 * 5)
    assert calls[-1] == (300 * 700 * 5, 300 * 700 * 5)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_file_is_studied_like_its_arrays(tmp_path):
    arrays = {"a": values((40, 70)), "b": values((33, 7, 65), 1)}
    np.savez(tmp_path / "x.npz", **arrays)
    np.save(tmp_path / "a.npy", arrays["a"])
    same(study_file(tmp_path / "x.npz"), study_arrays(arrays))
    same(study_file(tmp_path / "x.npz", tensors=["b"]), study_arrays({"b": arrays["b"]}))
    same(study_file(tmp_path / "a.npy"), study_arrays({"a": arrays["a"]}))


def test_records_are_flat():
    study = study_arrays({"x": np.ones((2, 32))}, formats=[MXFP4])
    (record,) = study.records()
    assert record["tensor"] == "x"
    assert "spread_counts" not in record
