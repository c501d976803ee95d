"""Ratios by hand, and where they stand to the targets."""

import pytest

torch = pytest.importorskip("torch")

from mxsim.bench.moe.figures import (  # noqa: E402
    dense_figures,
    gemm_figures,
    grouped_figures,
    saved_figures,
    step_figures,
)
from mxsim.bench.moe.parts import Kind, Part  # noqa: E402
from mxsim.bench.moe.workload import FULL, Routing  # noqa: E402
from mxsim.bench.targets import Verdict  # noqa: E402
from mxsim.bench.timing import Method, Timing  # noqa: E402
from mxsim.moe import Recipe  # noqa: E402


def _times(**us):
    return {key.replace("__", "."): Timing(x, x, x, Method.QUEUE, 9, 1) for key, x in us.items()}


def test_the_byte_counts_reach_the_aims():
    rows, width, gemm_inputs = FULL.rows, FULL.hidden + 3 * FULL.intermediate, FULL.hidden + FULL.intermediate
    saved = {
        "BF16": rows * 2 * width,
        "FP8": rows * gemm_inputs * 33 // 32 + rows * 4 * FULL.intermediate,
        "MXFP4": rows * width * 17 // 32,
    }
    of_bf16, of_fp8 = saved_figures(Routing.BALANCED, saved)
    assert (of_bf16.value, of_fp8.value) == (pytest.approx(0.265625), pytest.approx(0.3996, abs=1e-4))
    assert of_bf16.verdict is of_fp8.verdict is Verdict.AIM
    too_many = saved | {"MXFP4": saved["BF16"] // 3}
    assert [f.verdict for f in saved_figures(Routing.BALANCED, too_many)] == [Verdict.MISSED, Verdict.MISSED]
    assert [f.verdict for f in saved_figures(Routing.EMPTY, saved)] == [None, None]


def test_steps():
    times = _times(BF16=23.0, FP8=19.0, MXFP4=20.0)
    times |= {f"{name}, weights inside": time for name, time in _times(FP8=24.0, MXFP4=25.0).items()}
    of_bf16, of_fp8, *inside = step_figures(Routing.BALANCED, times)
    assert (of_bf16.value, of_fp8.value) == (1.15, 0.95)
    assert (of_bf16.verdict, of_fp8.verdict) == (Verdict.REACHED, Verdict.MISSED)
    assert [f.value for f in inside] == [23 / 25, 24 / 25]
    assert {f.verdict for f in inside} == {None}


QUANTIZERS = {
    "x__fp8__rows": 6.0,
    "x__fp8__cols": 8.0,
    "tokens__fp4": 1.0,
    "x__fp4__rows": 3.0,
    "x__fp4__cols": 4.0,
    "permute__bf16": 4.0,
    "permute__fp4": 1.0,
    "dense__fp8__rows": 97.0,
}


def test_grouped_totals():
    total, permuted, ideal = grouped_figures(Routing.BALANCED, _times(**QUANTIZERS))
    assert total.value == 14 / 8
    assert total.verdict is Verdict.AIM
    assert permuted.value == 18 / 9
    # 2 + 33/32 bytes an element become 2 + 66/32
    assert ideal.value == pytest.approx(130 / 8)
    times = _times(**QUANTIZERS, dense__fused__4=12.0, dense__fused__8=10.0)
    *_, fused, _ = grouped_figures(Routing.BALANCED, times)
    assert fused.value == 10 / 8
    assert fused.verdict is ideal.verdict is None


def test_dense_totals():
    times = _times(dense__fp8__rows=4.0, dense__fp8__cols=5.0, dense__fp4__rows=6.0, dense__fp4__cols=4.0)
    total, ideal = dense_figures(times)
    assert (total.value, total.verdict) == (0.9, Verdict.MISSED)
    assert ideal.value == pytest.approx(0.4 * 130 / 97)


def test_gemms_are_compared_by_their_rates():
    def part(key, kind, flops):
        return Part(key, kind, (Recipe.FP8,), key, print, (), flops)

    parts = [
        part(f"{precision} {kind.name}", kind, flops)
        for precision in ("fp8", "bf16")
        for kind, flops in ((Kind.FPROP, 600), (Kind.DGRAD, 300), (Kind.WGRAD, 600))
    ]
    times = {p.key: Timing(us, us, us, Method.QUEUE, 9, 1) for p, us in zip(parts, (6, 4, 10) * 2, strict=True)}
    dense = _times(dense__gemm__fp8=10.0, dense__wgrad__fp8=12.5, dense__gemm__bf16=20.0, dense__wgrad__bf16=25.0)
    rows, wgrad, wgrad_of_tiles, *bf16 = gemm_figures(Routing.BALANCED, parts, times, dense, 1000)
    assert (rows.value, wgrad.value, wgrad_of_tiles.value) == (0.9, 0.75, 0.6)
    assert (rows.verdict, wgrad.verdict) == (Verdict.REACHED, Verdict.AIM)
    assert wgrad_of_tiles.verdict is None
    assert [f.value for f in bf16] == [1.8, 1.5]
    assert [f.verdict for f in bf16] == [None, None]
    assert [f.verdict for f in gemm_figures(Routing.SKEWED, parts, times, dense, 1000)] == [None] * 5
