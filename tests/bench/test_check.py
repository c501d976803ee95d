"""A wrong result is found before it is timed."""

import pytest

torch = pytest.importorskip("torch")

from mxsim import kernels  # noqa: E402
from mxsim.bench.cases import OPS, Case, Data, Shape, cases_at  # noqa: E402
from mxsim.bench.check import Reference, _difference, problem_with, reference_for  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("reference", Reference)
@pytest.mark.parametrize("shape", [Shape(300, 256), Shape(300, 256, 5)], ids=str)
def test_the_ops_are_right(shape, reference):
    data = Data.random(shape, CPU)
    for case in cases_at(shape, OPS):
        assert problem_with(case, data, CPU, reference) == "", case.name


@pytest.mark.parametrize("shape", [Shape(200, 256), Shape(200, 256, 3)], ids=str)
def test_one_wrong_bit_is_found(shape, monkeypatch):
    for case in cases_at(shape, OPS):
        right = getattr(kernels, case.op)

        def wrong(*inputs, right=right, **options):
            results = right(*inputs, **options)
            first = results[0] if isinstance(results, tuple) else results
            codes = first[0] if isinstance(first, tuple) else first
            codes.view(torch.uint8)[-1, ...].view(-1)[-1] ^= 1
            return results

        data = Data.random(shape, CPU)
        case.inputs(data)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, case.op, wrong)
            assert "1 of " in problem_with(case, data, CPU, Reference.SIMULATOR), case.name


def test_what_is_not_written_is_found(monkeypatch):
    right, kept = kernels.fp4_to_bf16, []

    def lazy(codes, scales):
        """Writes once, and later hands out the same memory untouched."""
        if not kept:
            kept.append(right(codes, scales))
        return kept[0]

    shape = Shape(8, 128)
    monkeypatch.setattr(kernels, "fp4_to_bf16", lazy)
    assert "entries differ" in problem_with(
        Case("fp4_to_bf16", shape), Data.random(shape, CPU), CPU, Reference.SIMULATOR
    )


def test_a_difference_names_the_first_entry_and_both_bit_patterns():
    want = torch.zeros(3, 4, dtype=torch.float32)
    got = want.clone()
    got[1, 2], got[2, 0] = -0.0, 1.0
    assert (
        _difference(1, got, want) == "result 1: 2 of 12 entries differ, first at (1, 2): 0x80000000, needed 0x00000000"
    )


def test_bytes_past_the_last_group_are_not_compared():
    want = torch.zeros(3, 4, dtype=torch.uint8)
    longer = torch.full((5, 4), 7, dtype=torch.uint8)
    longer[:3] = 0
    assert _difference(0, longer, want) == ""
    assert "of shape (2, 4), needed" in _difference(0, longer[:2], want)
    assert "needed torch.uint8" in _difference(0, longer.float(), want)


def test_the_cpu_is_checked_against_the_simulator():
    assert reference_for(CPU) is Reference.SIMULATOR
    assert reference_for(torch.device("cuda")) in Reference
