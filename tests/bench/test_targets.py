"""Figures and their targets."""

import pytest

pytest.importorskip("torch")

from mxsim.bench.cases import DEFAULT_SHAPES, OPS, Case, Shape, cases_at
from mxsim.bench.rivals import transpose, unfused
from mxsim.bench.targets import (
    OVERHEAD_US,
    Target,
    Verdict,
    elements_target,
    of_copy_target,
    ratio_target,
)

LARGE = Shape(32768, 7168)


@pytest.mark.parametrize(
    "value, verdict",
    [(0.97, Verdict.AIM), (1.1, Verdict.AIM), (0.96, Verdict.REACHED), (0.90, Verdict.REACHED), (0.89, Verdict.MISSED)],
)
def test_larger_is_better(value, verdict):
    assert Target(0.90, 0.97).verdict(value) is verdict


@pytest.mark.parametrize(
    "value, verdict",
    [(7.9, Verdict.AIM), (8.0, Verdict.AIM), (8.1, Verdict.REACHED), (15.0, Verdict.REACHED), (15.1, Verdict.MISSED)],
)
def test_smaller_is_better_for_python(value, verdict):
    assert OVERHEAD_US.verdict(value) is verdict


def test_targets_of_the_large_shape():
    assert of_copy_target(Case("bf16_to_fp4_row", LARGE)) == Target(0.90, 0.97)
    assert of_copy_target(Case("bf16_to_fp4_and_fp8_row", LARGE)) == Target(0.88, 0.95)
    assert of_copy_target(Case("fp4_row_to_fp8_col", Shape(32768, 7168, 32))) == Target(0.80, 0.92)
    assert of_copy_target(Case("fp8_row_to_fp8_col", LARGE)) == Target(0.80, 0.92)
    with_target = [c for s in DEFAULT_SHAPES for c in cases_at(s, OPS) if of_copy_target(c)]
    assert len(with_target) == 8 + 1


def test_other_shapes_and_variants_have_none():
    assert of_copy_target(Case("bf16_to_fp4_row", LARGE, "stochastic")) is None
    assert of_copy_target(Case("bf16_to_fp4_row", Shape(4096, 7168))) is None
    assert of_copy_target(Case("fp4_row_to_fp8_col", Shape(32768, 7168, 8))) is None
    assert ratio_target("fp4_row_to_fp8_row", "fp4_to_bf16, bf16_to_fp8_row", Shape(4096, 7168)) is None


def test_targets_of_ratios():
    by_op = {rival.op: rival.name for rival in unfused()}
    assert ratio_target("fp4_row_to_fp8_row", by_op["fp4_row_to_fp8_row"], LARGE) == Target(2.5, 3.5)
    assert ratio_target("fp4_row_to_fp8_col", by_op["fp4_row_to_fp8_col"], LARGE) == Target(2.5, 3.5)
    assert ratio_target("bf16_to_fp4_row", "torchao 0.14 to_mx MXFP4 FLOOR, compiled", LARGE) == Target(4.5, 5.0)
    assert ratio_target("bf16_to_fp8_row", "torchao 0.14 to_mx MXFP8 FLOOR, compiled", LARGE) is None
    assert ratio_target("bf16_to_fp8_col", transpose().name, LARGE) is None


def test_the_host_build_has_a_target_on_two_threads():
    assert elements_target(Case("bf16_to_fp4_row", LARGE), 2) == Target(500e6, 1500e6)
    assert elements_target(Case("bf16_to_fp4_row", LARGE), 16) is None
    assert elements_target(Case("bf16_to_fp4_row", Shape(4, 128)), 2) is None
    assert elements_target(Case("fp4_to_bf16", LARGE), 2) is None
