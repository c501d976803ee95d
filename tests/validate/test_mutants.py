"""The validator finds every planted fault, says which step it breaks, and passes the implementation without one."""

import pytest
import torch

from mxsim import kernels, validate
from mxsim.blocks import ScaleRule
from tests.validate.mutants import MUTANTS


@pytest.mark.parametrize("op", validate.OPS)
def test_the_kernels_pass(op):
    report = validate.run(op, device="cpu", size="quick")
    assert report.ok, str(report)
    assert report.num_elements > 10**5


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    op, step, function = MUTANTS[name]
    report = validate.check(function, op, device="cpu", size="quick")
    (found,) = report.ops
    assert not report.ok
    assert found.num_mismatches > 0
    assert not [p for p in found.problems if "raised" in p.message]
    assert any(step in broken for broken in found.by_step), str(report)


def test_a_fault_is_not_taken_for_another():
    """Ties alone are wrong: no other rounding is named. Scales of zero blocks that become NaN break no rule of NaN."""
    (ties,) = validate.check(MUTANTS["rounds_ties_away"].function, "bf16_to_fp4_row", device="cpu", size="quick").ops
    assert set(ties.by_step) <= {"3.5 rounding of ties"}

    def nan_for_zero(x):
        codes, scales = kernels.bf16_to_fp4_row(x)
        is_zero = (x.reshape(-1, x.shape[-1] // 32, 32) == 0).all(-1)
        return codes, torch.where(is_zero, 255, scales).to(torch.uint8)

    (zero,) = validate.check(nan_for_zero, "bf16_to_fp4_row", device="cpu", size="quick").ops
    assert set(zero.by_step) == {"3.4 all-zero block"}


def test_one_wrong_code_among_all_values_and_scales_is_found():
    def wrong_once(x):
        codes, scales = kernels.bf16_to_fp4_row(x)
        bits = x.view(torch.int16).reshape(-1, x.shape[-1])[:, ::2]
        hit = (bits == 0x3F91) & (scales == 131).repeat_interleave(16, -1)
        return torch.where(hit, codes ^ 1, codes), scales

    report = validate.run("bf16_to_fp4_row", "cpu", wrong_once, cases="every BF16 value at every scale")
    assert 1 <= report.num_mismatches <= 3
    mismatch = report.ops[0].mismatches[0]
    assert mismatch.input.endswith("= 0x3F91 (1.1328125)")
    assert mismatch.step == "3.5 rounding"


def test_a_rule_that_is_wrong_for_one_amax_is_found():
    def wrong_once(x, *, scale_rule=ScaleRule.FLOOR):
        codes, scales = kernels.bf16_to_fp4_row(x, scale_rule=scale_rule)
        amax = x.reshape(-1, x.shape[-1] // 32, 32).abs().amax(-1).float()
        hit = (amax == 1.7578125) & (scale_rule is ScaleRule.EVEN)
        return codes, torch.where(hit, scales - 1, scales)

    report = validate.run("bf16_to_fp4_row", "cpu", wrong_once, cases="every BF16")
    assert report.ops[0].by_step.keys() == {"3.2 scale"}


def test_a_candidate_that_raises_is_reported_and_the_run_goes_on():
    def needs_rows(x):
        if not x.numel():
            raise RuntimeError("no\nrows")
        return kernels.bf16_to_fp4_row(x)

    report = validate.check(needs_rows, "bf16_to_fp4_row", size="quick")
    (found,) = report.ops
    assert not report.ok
    assert found.num_mismatches == 0
    assert {p.message for p in found.problems} == {"raised RuntimeError: no rows"}
    assert all(p.case.startswith("0 x ") for p in found.problems)
    assert sum(found.skipped.values()) > 0
    assert set(found.skipped) == {"the candidate has no scale_rule", "the candidate has no rounding"}


@pytest.mark.parametrize(
    "results, message",
    [
        (lambda codes, scales: codes, "returned 1 tensors, needed 2: codes, scales"),
        (lambda codes, scales: (codes, scales, codes), "returned 3 tensors"),
        (lambda codes, scales: None, "returned a NoneType, needed tensors"),
        (lambda codes, scales: (codes.int(), scales), "codes: has dtype torch.int32"),
        (lambda codes, scales: (codes, scales.t()), "scales: has shape"),
        (lambda codes, scales: (codes[:, ::2], scales), "codes: has shape"),
        (lambda codes, scales: (codes.t().contiguous().t(), scales), "codes: has strides"),
    ],
)
def test_results_of_another_form_are_reported(results, message):
    def candidate(x, *, scale_rule):
        return results(*kernels.bf16_to_fp4_row(x, scale_rule=scale_rule))

    report = validate.run("bf16_to_fp4_row", "cpu", candidate, "quick", cases="129 x 384")
    (found,) = report.ops
    assert not report.ok
    assert message in found.problems[0].message
    assert found.num_mismatches > 0
    assert found.num_elements == 129 * 384 + 129 * 12


def test_float_views_and_nested_tuples_are_accepted():
    def candidate(x, *, scale_rule):
        codes, scales = kernels.bf16_to_fp4_row(x, scale_rule=scale_rule)
        return [(codes.view(torch.float4_e2m1fn_x2),), (scales.view(torch.float8_e8m0fnu), None)]

    assert validate.run("bf16_to_fp4_row", "cpu", candidate, "quick", cases="x 384").ok
