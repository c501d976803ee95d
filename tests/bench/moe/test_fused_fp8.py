"""The one-read baseline: what it is checked on, and that a wrong one is not timed."""

import pytest

torch = pytest.importorskip("torch")

from mxsim import kernels  # noqa: E402
from mxsim.bench.moe import runner  # noqa: E402
from mxsim.bench.moe.fused_fp8 import NUM_WARPS, Unavailable, fused_kernels, same_bits, special_matrix  # noqa: E402
from mxsim.bench.moe.report import MoeReport  # noqa: E402
from mxsim.bench.moe.workload import TINY  # noqa: E402

CPU = torch.device("cpu")


def _two_kernels(x):
    return kernels.bf16_to_fp8_row(x), kernels.bf16_to_fp8_col(x)


def test_every_case_of_a_scale_is_among_the_special_blocks():
    """NUMERICS 7: s = 1 for zeros, the clamp at 2**-127, NaN, and amax on both sides of 448 * s."""
    x = special_matrix(CPU)
    for scales in (kernels.bf16_to_fp8_row(x).scales, kernels.bf16_to_fp8_col(x).scales):
        assert scales.isnan().any()
        assert (scales == 1).any()
        assert (scales == 2.0**-127).any()
        assert (scales == 2.0**120).any()
    assert (x.abs() == 448).any()
    assert (x.abs() == 450).any()


@pytest.mark.parametrize("spoiled", range(4))
def test_one_wrong_byte_is_seen(spoiled):
    x = special_matrix(CPU)
    assert same_bits(_two_kernels, x)

    def wrong(x):
        rows, cols = _two_kernels(x)
        tensor = (*rows[:2], *cols[:2])[spoiled]
        if tensor.dtype is torch.float32:
            tensor[1, 1] *= 2
        else:
            tensor.view(torch.uint8)[5, 7] ^= 1
        return rows, cols

    finite = torch.ones(128, 256, dtype=torch.bfloat16)
    assert same_bits(_two_kernels, finite)
    assert not same_bits(wrong, torch.cat([finite, finite]))


def test_without_cuda_the_reason_is_a_note():
    with pytest.raises(Unavailable, match="CUDA device"):
        fused_kernels(CPU)
    report = MoeReport({}, TINY)
    assert runner._fused(CPU, TINY, report) == {}
    assert report.notes == ["One-read FP8 is not beside it: it runs on a CUDA device."]


@pytest.mark.parametrize(
    "kernel, reason", [(lambda x: _two_kernels(2 * x), "its bits differ"), (lambda x: 1 / 0, "ZeroDivisionError")]
)
def test_a_wrong_or_failing_kernel_is_left_out(kernel, reason, monkeypatch):
    monkeypatch.setattr(runner, "fused_kernels", lambda device: {4: kernel})
    report = MoeReport({}, TINY)
    assert runner._fused(CPU, TINY, report) == {}
    assert reason in report.notes[0]
    monkeypatch.setattr(runner, "fused_kernels", lambda device: {4: _two_kernels})
    assert runner._fused(CPU, TINY, MoeReport({}, TINY)) == {4: _two_kernels}


@pytest.mark.gpu
def test_the_kernel_has_the_bits_of_the_two():
    pytest.importorskip("triton")
    assert set(fused_kernels(torch.device("cuda"))) == set(NUM_WARPS)
