"""Each number of a report against its definition in Fractions; no dependence on the cut; bounded memory; refusals."""

import math
import subprocess
import sys
import tracemalloc
from collections import defaultdict
from fractions import Fraction

import ml_dtypes
import numpy as np
import pandas as pd
import pytest

from mxsim.analysis import measure
from mxsim.blocks import (
    FP8_1X128,
    FP8_128X1,
    FP8_128X128,
    MXFP4,
    MXFP8_E4M3,
    MXINT8,
    NVFP4,
    BlockTensor,
    ScaleRule,
    fp4_row_to_fp8_row,
    quantize,
)
from mxsim.formats import decode

SHAPE = (3, 150)  # tails in every format


def values(seed: int, shape=SHAPE) -> np.ndarray:
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * np.exp(3 * random.standard_normal(shape))
    x[random.random(shape) < 0.05] = 0
    return x.astype(np.float32)


# --------------------------------------------------------------------------------------------------------- definitions
def floor_log2(x: Fraction) -> int:
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def elements(x, t):
    """(index, block, position, x, scale, element code's value) of each element that is compared."""
    rows, columns = t.format.block_lengths(2, t.axis)
    scales = t.scale_values()
    for i, j in np.ndindex(x.shape):
        scale = scales[i // rows, j // columns]
        element = float(decode(t.codes[i, j], t.format.element))
        if math.isnan(scale) or math.isnan(element):
            continue
        scale = Fraction(float(scale)) * (1 if t.tensor_scale is None else Fraction(float(t.tensor_scale)))
        position = i % rows * columns + j % columns
        yield (i, j), (i // rows) * scales.shape[1] + j // columns, position, Fraction(float(x[i, j])), scale, element


def expected(members, fmt):
    """Every column of a table, over a group of `elements`."""
    relative, ulps, signal, noise, flags = [], [], Fraction(0), Fraction(0), defaultdict(int)
    result = product = Fraction(0)
    for _, _, _, x, scale, element in members:
        q = Fraction(element) * scale
        error = abs(q - x)
        signal, noise, result, product = signal + x**2, noise + error**2, result + q**2, product + x * q
        if x:
            relative.append(error / abs(x))
            flags["underflowed"] += element == 0
        if scale:
            e = floor_log2(abs(x) / scale) if x else fmt.element.emin
            e = min(max(e, fmt.element.emin), fmt.element.emax)
            ulps.append(error / scale / Fraction(2) ** (e - fmt.element.mantissa_bits))
        flags["saturated"] += bool(scale) and abs(x) > Fraction(fmt.element.max_finite) * scale * (
            1 + Fraction(1, 2**20)
        )
        flags["subnormal"] += 0 < abs(element) < fmt.element.min_normal
    n = len(members)
    return {
        "num_elements": n,
        "mse": float(noise / n),
        "sqnr_db": math.nan if not signal else 10 * math.log10(signal / noise) if noise else math.inf,
        "mean_relative_error": float(sum(relative) / len(relative)) if relative else math.nan,
        "max_relative_error": float(max(relative)) if relative else math.nan,
        "mean_ulp_error": float(sum(ulps) / n),
        "max_ulp_error": float(max(ulps, default=0)),
        "saturated": flags["saturated"] / n,
        "underflowed": flags["underflowed"] / n,
        "subnormal": math.nan if fmt is MXINT8 else flags["subnormal"] / n,
        "relative_frobenius_error": math.sqrt(noise / signal) if signal else math.nan,
        "cosine_similarity": float(product) / math.sqrt(signal * result) if result else 0.0,
    }


def assert_row(got, want):
    for name, value in got.items():
        if name in want:
            assert value == pytest.approx(want[name], rel=1e-12, nan_ok=True), name


def assert_table(table, key, members, fmt):
    groups = defaultdict(list)
    for member in members:
        groups[key(member)].append(member)
    assert table.iloc[:, 0].tolist() == sorted(groups)
    for row in table.to_dict("records"):
        assert_row(row, expected(groups[next(iter(row.values()))], fmt))


CASES = [
    *((fmt, None) for fmt in (MXFP4, MXFP8_E4M3, MXINT8, NVFP4, FP8_1X128, FP8_128X1, FP8_128X128)),
    (MXFP4, 0),
    (FP8_1X128, 0),
]


@pytest.mark.parametrize("fmt, axis", CASES, ids=str)
@pytest.mark.parametrize("poisoned", [False, True])
def test_every_number_is_its_definition(fmt, axis, poisoned):
    x = values(1, (130, 7)) if axis == 0 else values(2)
    if poisoned and fmt is not FP8_128X128:
        x[1, 3], x[-1, -1] = np.nan, -np.inf
    t = quantize(x, fmt, axis=axis)
    report = measure(x, t, index_axis=-1)
    members = list(elements(x, t))
    assert report.num_left_out == x.size - len(members)
    assert_row(report.summary().iloc[0].to_dict(), expected(members, fmt))
    assert_table(report.by_binade(), lambda m: floor_log2(abs(m[3])), [m for m in members if m[3]], fmt)
    assert_table(report.by_position(), lambda m: m[2], members, fmt)
    assert_table(report.by_index(), lambda m: m[0][1], members, fmt)
    blocks = report.by_block()
    assert blocks["block"].tolist() == list(range(t.scales.size))
    scales = t.scale_values().reshape(-1) * (1 if t.tensor_scale is None else float(t.tensor_scale))
    np.testing.assert_array_equal(blocks["scale"], scales)
    filled = blocks[blocks["num_elements"] > 0].drop(columns=["scale", "amax"])
    assert_table(filled, lambda m: m[1], members, fmt)
    for block, amax in zip(blocks["block"], blocks["amax"], strict=True):
        of_block = [abs(float(m[3])) for m in members if m[1] == block]
        assert amax == max(of_block) if of_block else math.isnan(amax)


def test_hand_computed():
    # Scale 1: 7 -> 6, ulp 2; 0.2 -> 0 and 0.3 -> 0.5, ulp 0.5 (subnormal); 0 and 2 are exact.
    report = measure(np.array([7.0, 0.2, 0.3, 0.0, 2.0]), MXFP4)
    assert report.mean_ulp_error == pytest.approx((0.5 + 0.4 + 0.4) / 5)
    assert report.max_relative_error == 1
    assert report.mse == pytest.approx((1 + 0.04 + 0.04) / 5)
    binades = report.by_binade().set_index("binade")
    assert binades["num_elements"].to_dict() == {-3: 1, -2: 1, 1: 1, 2: 1}
    assert binades["saturated"].to_dict() == {-3: 0, -2: 0, 1: 0, 2: 1}
    assert binades["underflowed"].to_dict() == {-3: 1, -2: 0, 1: 0, 2: 0}
    assert binades["subnormal"].to_dict() == {-3: 0, -2: 1, 1: 0, 2: 0}


def test_beyond_the_format_an_ulp_is_the_largest_it_has():
    t = BlockTensor(np.array([7], np.uint8), np.array([127], np.uint8), MXFP4)  # 6
    assert measure(np.array([20.0]), t).max_ulp_error == 7  # of 2, the spacing from 4 to 6


def test_rounding_to_nearest_stays_within_half_an_ulp_where_nothing_saturates():
    for fmt in (MXFP4, MXFP8_E4M3, MXINT8, FP8_1X128):
        x = values(3, (40, 256))
        assert 0.45 < measure(x, fmt, scale_rule=ScaleRule.RCEIL).max_ulp_error <= 0.5
    assert measure(x, MXFP4, scale_rule=ScaleRule.FLOOR).max_ulp_error > 0.5


def test_any_result_of_a_conversion_can_be_measured_and_leading_axes_count():
    x = values(4, (2, 3, 128))
    t = fp4_row_to_fp8_row(quantize(x, MXFP4))
    report, fp4 = measure(x, t, index_axis=1), measure(x, MXFP4)
    assert report.mse == fp4.mse  # headroom 6 loses nothing
    assert report.by_index()["num_elements"].tolist() == [256] * 3
    first = measure(x[:, 0], MXFP4)
    assert report.by_index().loc[0, "mse"] == first.mse


def test_bfloat16_memory_maps_and_strided_arrays():
    x = values(5, (40, 96)).astype(ml_dtypes.bfloat16)
    report = measure(x, MXFP4)
    assert report.mse == measure(x.astype(np.float64), MXFP4).mse
    assert measure(np.repeat(x, 2, axis=1)[:, ::2], MXFP4).mse == report.mse


# ---------------------------------------------------------------------------------------------- cuts, order and memory
@pytest.mark.parametrize(
    "fmt, axis", [(MXFP4, -1), (MXFP4, 0), (MXINT8, 1), (FP8_1X128, -1), (FP8_128X128, None)], ids=str
)
def test_no_bit_depends_on_the_cut(fmt, axis):
    x = values(6, (2, 130, 170))
    x[0, 0, 0] = np.nan
    reports = [measure(x, fmt, axis=axis, index_axis=1, chunk=chunk) for chunk in (1, 5000, 10**7)]
    reports.append(measure(x, quantize(x, fmt, axis=axis), index_axis=1, chunk=3000))
    for table in ("summary", "by_binade", "by_position", "by_index", "by_block"):
        first, *others = (getattr(report, table)() for report in reports)
        for other in others:
            pd.testing.assert_frame_equal(first, other, check_exact=True)


def peak_bytes(path, size) -> int:
    x = np.lib.format.open_memmap(path, "w+", np.float32, (size,))
    for start in range(0, size, 2**18):
        x[start : start + 2**18] = values(start, (min(2**18, size - start),))
    x.flush()
    del x
    tracemalloc.start()
    report = measure(np.load(path, mmap_mode="r"), MXFP4, chunk=2**13)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.num_elements == size
    return peak


def test_memory_does_not_grow_with_the_tensor(tmp_path):
    peak_bytes(tmp_path / "warm.npy", 2**14)  # tables made on first use
    small, large = (peak_bytes(tmp_path / f"{size}.npy", size) for size in (2**16, 2**20))
    assert large < 1.2 * small
    assert large < 2**22  # the larger file


def test_analysis_needs_no_pandas_until_a_table_is_asked_for():
    script = """
import sys
sys.modules["pandas"] = None
import numpy as np
from mxsim.analysis import measure
from mxsim.blocks import MXFP4
report = measure(np.ones((1, 32)), MXFP4)
assert report.mse == 0
try:
    report.summary()
except ModuleNotFoundError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'mxsim[figures]'" in run.stdout


# ------------------------------------------------------------------------------------------------------------ refusals
ONES = np.ones((2, 64), np.float32)
FP4 = quantize(ONES, MXFP4)


@pytest.mark.parametrize(
    "error, words, call",
    [
        (TypeError, "x has dtype int64, not floating-point", lambda: measure(np.arange(32), MXFP4)),
        (TypeError, "x has dtype bool", lambda: measure(np.ones(32, bool), MXFP4)),
        (TypeError, "x has dtype complex128", lambda: measure(np.ones(32, complex), MXFP4)),
        (TypeError, "x has dtype object", lambda: measure(np.array([None]), MXFP4)),
        (TypeError, "t is a ndarray", lambda: measure(ONES, ONES)),
        (ValueError, r"x has the shape \(0, 32\)", lambda: measure(np.zeros((0, 32)), MXFP4)),
        (ValueError, "the tensor has 0 axes", lambda: measure(np.float32(1), MXFP4)),
        (ValueError, "the tensor has 1 axes, needed at least 2", lambda: measure(np.ones(32), FP8_128X128)),
        (ValueError, "x has a NaN or an infinity in every block", lambda: measure(np.full(64, np.nan), MXFP4)),
        (ValueError, "x holds only zeros", lambda: measure(np.zeros(64), MXFP4)),
        (ValueError, "x holds the magnitude 1e-200", lambda: measure(np.full(64, 1e-200), MXFP4)),
        (ValueError, "x holds the magnitude 1e[+]200", lambda: measure(np.full(64, -1e200), MXFP4)),
        (ValueError, r"t has the shape \(2, 64\), needed \(64, 2\)", lambda: measure(ONES.T, FP4)),
        (ValueError, "scale_rule is given, but t is quantized", lambda: measure(ONES, FP4, scale_rule=ScaleRule.EVEN)),
        (ValueError, "axis is given, but t is quantized", lambda: measure(ONES, FP4, axis=0)),
        (ValueError, "t is NVFP4, whose scale needs the whole tensor", lambda: measure(ONES, NVFP4)),
        (ValueError, "axis is 2, needed -2 to 1", lambda: measure(ONES, MXFP4, axis=2)),
        (ValueError, "index_axis is 2, needed an integer -2 to 1", lambda: measure(ONES, MXFP4, index_axis=2)),
        (ValueError, "index_axis is 0.5", lambda: measure(ONES, MXFP4, index_axis=0.5)),
        (ValueError, "chunk is 0", lambda: measure(ONES, MXFP4, chunk=0)),
        (TypeError, "scale_rule is 'floor'", lambda: measure(ONES, MXFP4, scale_rule="floor")),
        (ValueError, "by_index: measure was called without index_axis", lambda: measure(ONES, MXFP4).by_index()),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_a_block_of_NaN_beside_others_is_left_out_and_seen_in_its_row():
    x = np.ones((1, 64), np.float32)
    x[0, 40] = np.nan
    report = measure(x, MXFP4)
    assert (report.num_elements, report.num_left_out) == (32, 32)
    blocks = report.by_block()
    assert blocks["num_elements"].tolist() == [32, 0]
    assert blocks.loc[1].drop(["block", "num_elements"]).isna().all()


def test_codes_that_are_NaN_are_left_out():
    t = BlockTensor(np.array([[0x38, 0x7F]], np.uint8), np.ones((1, 1), np.float32), FP8_1X128)
    report = measure(np.ones((1, 2), np.float32), t)
    assert (report.num_elements, report.num_left_out, report.mse) == (1, 1, 0)
