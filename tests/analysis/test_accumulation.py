"""Errors are those of their definition, data are what their names say, and known costs of 13 bits come out."""

import math
from fractions import Fraction

import numpy as np
import pytest

from mxsim.analysis.accumulation import (
    ROW_SCALE,
    AccumulationRow,
    Case,
    Distribution,
    ErrorOf,
    compare_with_quantization,
    concatenate_rows,
    default_cases,
    dot_errors,
    exact_dot,
    quantize_row,
    quantized_operands,
    sample,
    sweep,
)
from mxsim.blocks import FP8_1X128, MXFP4, quantize
from mxsim.blocks.gemm import HOPPER, fp8_gemm
from mxsim.formats import E4M3, decode


def pair(distribution: Distribution, k: int, size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    return sample(distribution, (size, k), seed=0), sample(distribution, (size, k), seed=1)


# -------------------------------------------------------------------------------------------------------------- data
def test_samples_have_the_moments_of_their_distributions():
    shape = (100, 2000)
    normal = sample(Distribution.NORMAL, shape)
    assert normal.mean() == pytest.approx(0, abs=0.01)
    assert normal.std() == pytest.approx(1, abs=0.01)
    assert (normal**4).mean() == pytest.approx(3, abs=0.1)
    assert np.array_equal(sample(Distribution.POSITIVE_NORMAL, shape), np.abs(normal))
    t4 = sample(Distribution.STUDENT_T4, shape)
    assert np.quantile(t4, [0.25, 0.5, 0.75, 0.975]) == pytest.approx([-0.7407, 0, 0.7407, 2.7764], abs=0.03)
    uniform = sample(Distribution.UNIFORM, shape)
    assert 0 < uniform.min() < 0.001
    assert 0.999 < uniform.max() < 1
    assert np.array_equal(sample(Distribution.UNIFORM_1_2, shape), 1 + uniform)
    assert np.array_equal(sample(Distribution.LOG_UNIFORM, shape), np.exp2(16 * uniform))


def test_samples_of_other_seeds_are_others():
    first, second = pair(Distribution.NORMAL, 1000)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05


def test_an_unknown_distribution_is_refused():
    with pytest.raises(TypeError, match="needed a Distribution"):
        sample("normal", (1, 1))


def test_long_rows_are_whole_rows_one_after_another():
    x = np.arange(12.0).reshape(4, 3)
    long = concatenate_rows(x, (5, 8))
    assert long.shape == (5, 8)
    assert {tuple(row[i : i + 3]) for row in long for i in (0, 3)} <= {tuple(row) for row in x}
    assert {tuple(row[6:]) for row in long} <= {tuple(row[:2]) for row in x}
    with pytest.raises(ValueError, match="at least one element"):
        concatenate_rows(np.zeros((3, 0)), (1, 1))


@pytest.mark.parametrize("amax, scale", [(448.0, 1), (448.5, 2), (224.0, 0.5), (1.0, 2.0**-8), (0.0, 2.0**-127)])
def test_a_row_has_the_smallest_power_of_two_that_holds_its_largest_element(amax, scale):
    x = np.zeros((1, 300))
    x[0, 200] = -amax
    t = quantize_row(x)
    assert t.scales.tolist() == [[scale] * 3]
    assert t.dequantize(np.float64)[0, 200] == pytest.approx(-amax, rel=2**-4)


def test_a_row_of_one_block_is_quantized_as_ever():
    x = sample(Distribution.NORMAL, (5, 128))
    ours, blocks = quantize_row(x), quantize(x, FP8_1X128)
    assert np.array_equal(ours.codes, blocks.codes)
    assert np.array_equal(ours.scales, blocks.scales)


# ------------------------------------------------------------------------------------------------------------ errors
def test_errors_of_a_hand_computed_example():
    reference = np.array([[3.0, -4.0]])
    frobenius, signed = dot_errors(np.array([[3.0, -3.0]]), reference)
    assert frobenius == 0.2  # 1 / 5
    assert signed == float(f"{-1 / 7:.6g}")  # toward zero
    assert dot_errors(reference, reference) == (0, 0)


def test_the_reference_is_exact():
    random = np.random.default_rng(0)
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F])
    a, b = (quantize_row(decode(random.choice(finite, (2, 700)), E4M3)) for _ in range(2))
    exact = exact_dot(a, b)
    for i in range(2):
        for j in range(2):
            x, y = a.dequantize(np.float64)[i], b.dequantize(np.float64)[j]
            assert Fraction(exact[i, j]) == sum(Fraction(p) * Fraction(q) for p, q in zip(x, y, strict=True))


# ------------------------------------------------------------------------------------------------------------- sweep
@pytest.mark.parametrize("k", [128, 640, 1024])
def test_each_row_is_the_error_of_its_own_gemm(k):
    a, b = pair(Distribution.STUDENT_T4, 1024)
    cases = [Case(k, bits, interval) for bits in (8, 13) for interval in (32, 128, 512, None)]
    rows = list(sweep("t4", a, b, cases))
    x, y = quantize_row(a[:, :k]), quantize_row(b[:, :k])
    for row, case in zip(rows, cases, strict=True):
        errors = dot_errors(fp8_gemm(x, y, accumulator=case.accumulator), exact_dot(x, y))
        expected = ("t4", k, ROW_SCALE, ErrorOf.ACCUMULATION, case.fraction_bits, case.promotion_interval, *errors)
        assert row == AccumulationRow(*expected)


def test_the_default_case_is_hopper():
    accumulator = Case(7168).accumulator
    assert vars(accumulator) | {"name": ""} == vars(HOPPER) | {"name": ""}


def test_default_cases_cover_bits_intervals_and_k_once_each():
    cases = default_cases()
    assert len(set(cases)) == len(cases) == 2 * 16 + 6 * 7 - 2
    assert {case.fraction_bits for case in cases if case.k == 7168} == set(range(8, 24))
    assert {case.promotion_interval for case in cases if case.k == 4096} == {32, 64, 128, 256, 512, None}


def test_rows_that_are_too_short_are_refused():
    a, b = pair(Distribution.NORMAL, 128)
    with pytest.raises(ValueError, match="k = 256, but rows have 128 elements"):
        list(sweep("normal", a, b, [Case(256)]))


# ------------------------------------------------------------------------------------------------------ known results
def errors_of(distribution: Distribution, *cases: Case) -> list[AccumulationRow]:
    return list(sweep(distribution.value, *pair(distribution, max(case.k for case in cases)), cases))


@pytest.mark.parametrize("distribution", [Distribution.POSITIVE_NORMAL, Distribution.UNIFORM, Distribution.UNIFORM_1_2])
def test_the_public_prediction_without_promotion(distribution):
    (row,) = errors_of(distribution, Case(4096, promotion_interval=None))
    assert row.mean_signed_relative_error == pytest.approx(-0.068, abs=0.0025)


def test_promotion_of_positive_data():
    never, promoted = errors_of(Distribution.POSITIVE_NORMAL, Case(7168, promotion_interval=None), Case(7168))
    assert never.relative_frobenius_error == pytest.approx(0.108, abs=0.002)
    assert promoted.relative_frobenius_error == pytest.approx(0.00062, abs=0.00002)


def test_truncation_of_positive_data_is_toward_zero_and_no_more_than_every_term_could_lose():
    cases = [Case(k, bits, interval) for k in (128, 1024) for bits in (8, 13, 20) for interval in (32, 128, None)]
    for row, case in zip(errors_of(Distribution.UNIFORM, *cases), cases, strict=True):
        span = min(case.promotion_interval or case.k, case.k)
        # q <= 2**(1 - bits) of the sum, of 34 truncations a step; each of the last steps the sum is no larger.
        assert -34 * (span / 32) * 2.0 ** (1 - case.fraction_bits) < row.mean_signed_relative_error <= 0


def test_an_interval_of_at_least_k_is_none():
    shorter, equal, never = errors_of(Distribution.NORMAL, *(Case(512, promotion_interval=i) for i in (256, 512, None)))
    assert equal.relative_frobenius_error == never.relative_frobenius_error
    assert shorter.relative_frobenius_error != never.relative_frobenius_error


# ------------------------------------------------------------------------------------ beside the error of quantizing
def test_quantization_accumulation_and_total():
    a, b = pair(Distribution.NORMAL, 1024, size=48)
    rows = list(compare_with_quantization("normal", a, b))
    names = [ROW_SCALE, "FP8_1X128", "MXFP4 x FP8_1X128", "MXFP4"]
    assert [(row.operands, row.error_of) for row in rows] == [
        (name, kind) for name in names for kind in (ErrorOf.QUANTIZATION, ErrorOf.ACCUMULATION, ErrorOf.TOTAL)
    ]
    for quantization, accumulation, total in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert quantization.fraction_bits is None
        assert (accumulation.fraction_bits, accumulation.promotion_interval) == (13, 128)
        largest = quantization.relative_frobenius_error + 1.2 * accumulation.relative_frobenius_error
        assert total.relative_frobenius_error <= largest + 1e-6
    error = {row.operands: row.relative_frobenius_error for row in rows[::3]}
    assert error["FP8_1X128"] == pytest.approx(0.0375, abs=0.003)
    assert error["MXFP4"] == pytest.approx(0.16, abs=0.02)
    # Independent errors of two operands add in squares; FP8's is nothing beside MXFP4's.
    assert error["MXFP4 x FP8_1X128"] == pytest.approx(error["MXFP4"] / math.sqrt(2), rel=0.1)


def test_mxfp4_operands_keep_their_values_and_lose_nothing_in_the_accumulator():
    a, b = pair(Distribution.NORMAL, 1024)
    x, y = quantized_operands(a, b)["MXFP4"]
    assert np.array_equal(x.dequantize(), quantize(a, MXFP4).dequantize())
    rows = [row for row in compare_with_quantization("normal", a, b) if row.operands == "MXFP4"]
    assert [row.relative_frobenius_error for row in rows if row.error_of is ErrorOf.ACCUMULATION] == [0]
    assert np.array_equal(fp8_gemm(x, y), exact_dot(x, y).astype(np.float32))


def test_an_accumulator_that_is_never_promoted_takes_rows_of_one_scale_only():
    a, b = pair(Distribution.NORMAL, 256)
    never = Case(256, promotion_interval=None).accumulator
    rows = list(compare_with_quantization("normal", a, b, accumulators=(never,)))
    assert {row.operands for row in rows if row.error_of is not ErrorOf.QUANTIZATION} == {ROW_SCALE}
