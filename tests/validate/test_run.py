"""A whole run: on the device where there is one, exhaustively on the CPU; and what may happen on the way."""

import pytest
import torch

from mxsim import kernels, validate
from mxsim.validate import runner


@pytest.mark.gpu
def test_the_kernels_on_the_device_equal_the_simulator():
    report = validate.run(device="cuda", size="full")
    assert report.ok, str(report)


@pytest.mark.slow
def test_the_host_build_equals_the_simulator():
    report = validate.run(device="cpu", size="full")
    assert report.ok, str(report)


def test_a_fault_far_into_a_large_case_is_located():
    """Copies 3, 5 and 9 of 16 are wrong in one byte; two of them are looked into."""
    wrong_rows = [256 * 3 + 7, 256 * 5 + 7, 256 * 9 + 7]

    def candidate(x):
        codes, scales = kernels.bf16_to_fp4_row(x)
        codes[wrong_rows, 11] ^= 0x11
        return codes, scales

    report = validate.run("bf16_to_fp4_row", "cpu", candidate, cases="256 x 7168, 16 times over")
    (found,) = report.ops
    assert found.num_elements == 16 * 256 * (7168 + 224)
    assert found.num_mismatches == 6
    assert {m.index for m in found.mismatches} <= {(row, column) for row in wrong_rows for column in (22, 23)}
    assert {m.index[0] for m in found.mismatches} == set(wrong_rows[:1])  # two mismatches are kept of a case
    assert sum(found.by_step.values()) == 6
    assert any("further copies" in step for step in found.by_step)


def test_a_candidate_that_writes_to_its_inputs_is_reported():
    def candidate(codes, scales):
        out = kernels.fp4_to_bf16(codes, scales)
        scales.zero_()
        return out

    report = validate.run("fp4_to_bf16", "cpu", candidate, cases="every code")
    assert report.ops[0].num_mismatches == 0
    assert not report.ok
    assert report.ops[0].problems[0].message == "the candidate wrote to its inputs"


def test_a_lost_device_ends_the_run_with_a_report(monkeypatch):
    is_lost = []

    def candidate(codes, scales):
        is_lost.append(True)
        raise RuntimeError("an illegal memory access was encountered")

    def synchronize(device):
        if is_lost:
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(runner, "_synchronize", synchronize)
    report = validate.run("fp4_to_bf16", "cpu", candidate, "quick")
    assert len(is_lost) == 1
    (problem,) = report.ops[0].problems
    assert "answers no more" in problem.message
    assert not report.ok


def test_progress_counts_every_case():
    seen = []
    report = validate.run(
        ["fp4_to_bf16", "bf16_to_fp8_tile"], "cpu", None, "quick", cases="128", progress=lambda *step: seen.append(step)
    )
    assert [done for _, done, _ in seen] == list(range(len(seen)))
    assert {total for _, _, total in seen} == {len(seen)}
    assert sum(op.num_cases for op in report.ops) == len(seen)


@pytest.mark.parametrize(
    "arguments", [("nope",), ([],), ("all", "tpu"), ("all", "cpu", None, "half"), ("all", torch.device("cuda", 99))]
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match=r"^validate: "):
        validate.run(*arguments)
