"""A whole run on the CPU: everything is there, and what is wrong is not timed."""

import json

import pytest

torch = pytest.importorskip("torch")

from mxsim.bench import moe  # noqa: E402
from mxsim.bench.moe import runner  # noqa: E402
from mxsim.bench.moe.parts import Kind  # noqa: E402
from mxsim.bench.moe.workload import TINY, Routing  # noqa: E402
from mxsim.kernels import Fp4Rows  # noqa: E402
from mxsim.moe import stored  # noqa: E402
from tests.bench.moe.conftest import LEAST  # noqa: E402

NAMES = ["BF16", "FP8", "MXFP4", "FP8, weights inside", "MXFP4, weights inside"]


def test_every_routing_is_checked_and_timed(cpu_report):
    assert cpu_report.ok, cpu_report.problems
    assert cpu_report.shape == TINY
    assert [r.routing for r in cpu_report.routings] == list(Routing)
    for found in cpu_report.routings:
        assert [s.name for s in found.steps] == NAMES
        assert all(s.timing.us > 0 for s in found.steps)
        assert [c.recipe for c in found.checks] == NAMES[1:]
        assert set(found.saved) == {"BF16", "FP8", "MXFP4"}
    assert [bool(r.parts) for r in cpu_report.routings] == [True, True, False]


def test_sums_add_the_parts_of_a_recipe(cpu_report):
    found = cpu_report.routings[0]
    assert set(found.sums("BF16")) == {
        Kind.PERMUTE,
        Kind.FPROP,
        Kind.DGRAD,
        Kind.WGRAD,
        Kind.SWIGLU_FORWARD,
        Kind.SWIGLU_BACKWARD,
    }
    assert set(found.sums("FP8")) == set(found.sums("BF16")) | {Kind.QUANTIZE}
    assert set(found.sums("MXFP4")) == set(found.sums("FP8")) | {Kind.CONVERT}
    by_key = {p.key: p.timing.us for p in found.parts}
    assert found.sums("MXFP4")[Kind.CONVERT] == pytest.approx(
        by_key["x.fp4.rows"] + by_key["x.fp4.cols"] + by_key["a.fp4.cols"]
    )


def test_the_json_has_it_all_and_no_targets_on_the_cpu(cpu_report):
    document = json.loads(json.dumps(cpu_report.to_json(), allow_nan=False))
    assert document["ok"] is True
    assert {len(document["provenance"][f"{part}_sources_sha256"]) for part in ("kernel", "moe")} == {64}
    assert {"device", "torch", "triton", "date", "command"} <= document["provenance"].keys()
    assert document["shape"]["rows"] == 128
    assert all("target" not in figure for figure in document["figures"])
    assert len(document["figures"]) == 3 * (2 + 4) + 2 * (3 + 5) + 2
    assert document["peaks"] == []
    balanced = document["routings"][0]
    assert balanced["group_sizes"] == [16] * 8
    assert balanced["saved_bytes"]["MXFP4"] == sum(s["bytes"] for s in balanced["saved"]["MXFP4"])
    assert "host_us" not in balanced["steps"][0]


def test_wrong_results_are_a_problem_and_not_timed(monkeypatch):
    right = stored.rows_from_fp4

    def negated(fp4, *arguments):
        return right(Fp4Rows(fp4.codes ^ 0x88, fp4.scales), *arguments)

    monkeypatch.setattr(stored, "rows_from_fp4", negated)
    monkeypatch.setattr(runner, "cache_bytes", lambda _: 1)
    monkeypatch.setattr(runner, "_IN_PARTS", ())
    monkeypatch.setattr(runner, "measure_peak", lambda *_: None)
    report = moe.run("cpu", effort=LEAST)
    assert not report.ok
    assert all(case.startswith("MXFP4") and "relative error" in message for case, message in report.problems)
    for found in report.routings:
        assert [s.name for s in found.steps] == ["BF16", "FP8", "FP8, weights inside"]
    assert not any("forward + backward" in figure.name for figure in report.figures)


def test_what_raises_is_a_problem_and_the_rest_goes_on(monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA out of memory\nwith a second line")

    monkeypatch.setattr(runner, "measure_peak", fail)
    monkeypatch.setattr(runner, "parts_of_layer", fail)
    monkeypatch.setattr(runner, "cache_bytes", lambda _: 1)
    seen = []
    report = moe.run("cpu", effort=LEAST, progress=lambda text, done, total: seen.append((done, total)))
    assert len(report.problems) == 6 + 2
    assert {m for _, m in report.problems} == {"raised RuntimeError: CUDA out of memory with a second line"}
    assert all(len(found.steps) == 5 for found in report.routings)
    assert [done for done, _ in seen] == list(range(seen[0][1]))
