"""`mxsim bench ep`: a run on two processes, its figures and targets, exit status, and what a failing process leaves."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from mxsim.bench import ep  # noqa: E402
from mxsim.bench.ep.check import Check, check  # noqa: E402
from mxsim.bench.ep.clock import _slowest  # noqa: E402
from mxsim.bench.ep.report import Dispatched, EpReport, LayerStep  # noqa: E402
from mxsim.bench.targets import Verdict  # noqa: E402
from mxsim.cli import app  # noqa: E402
from mxsim.moe import ExpertParallel, Recipe  # noqa: E402


def _run(*arguments, columns=200):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["bench", "ep", *arguments])


def test_a_run_on_two_processes(tmp_path):
    file = tmp_path / "result.json"
    result = _run("--device", "cpu", "--json", str(file))
    assert result.exit_code == 0, result.output
    for text in (
        "2 ranks; hidden 256",
        "compared first with those of one process, bit by bit",
        "all-to-all",
        "Whole layer",
        "Figures",
    ):
        assert text in result.stdout, text
    assert "at least" not in result.stdout  # targets are an H200's
    found = json.loads(file.read_text())
    assert found["ok"] is True
    assert found["provenance"]["backend"] == "gloo"
    assert len(found["checks"]) == 3 * len(ep.TINY.num_chunks)
    assert {tuple(c["compared"]) for c in found["checks"] if c["recipe"] == "MXFP4"} == {("y", "dx", "dweights", "dw1")}
    cases = {(d["tokens"], d["recipe"], d["num_chunks"]): d for d in found["dispatch"]}
    assert len(cases) == 3 * 2
    for (tokens, recipe, num_chunks), d in cases.items():
        assert d["row_bytes"] == {"BF16": 512, "FP8": 264, "MXFP4": 136}[recipe]
        assert d["bytes_to_others"] == tokens * d["row_bytes"]  # half of tokens * top-2 rows
        assert 0 < d["min_us"] <= d["us"] <= d["max_us"]
        assert len(d["parts"]) == (5 if num_chunks == 1 else 0)
    assert {(s["tokens"], s["recipe"]) for s in found["layer"]} == {(t, r) for t, r, _ in cases}
    assert all(s["us"] > 0 for s in found["layer"])


def test_a_failing_process_ends_the_run_with_its_error():
    with pytest.raises(RuntimeError, match=r"^bench ep: ValueError: .* 192.* not a multiple of 128"):
        ep.run("cpu", shape=replace(ep.TINY, hidden=192))


def report_of(us=(30.0, 15.0, 10.0), tokens=32768, problem=""):
    provenance = {"device": "2 x H200", "threads": 1, "torch": "2", "mxsim": "0", "backend": "NCCL"}
    report = EpReport(provenance, "shape", 2, True)
    report.checks.append(Check("MXFP4", 1, ("y",), problem))
    for recipe, time, size in zip(("BF16", "FP8", "MXFP4"), us, (14336, 7392, 3808), strict=True):
        for num_chunks, factor in ((1, 1.0), (2, 0.5 if recipe == "BF16" else 2.0)):
            timing = (time * factor, time * factor, time * factor, 3, True)
            report.dispatches.append(Dispatched(tokens, recipe, num_chunks, size, 1000 * size, *timing))
        report.steps.append(LayerStep(tokens, recipe, 100 * time, 1.0, 1.0, 3, 10**9, int(time * 1e9), 10**10))
    return report


def test_figures_and_targets():
    figures = {f.name: f for f in report_of().figures}
    want = {
        "bytes on the wire, BF16 / MXFP4": (14336 / 3808, Verdict.AIM),
        "bytes on the wire, FP8 / MXFP4": (7392 / 3808, Verdict.AIM),
        "dispatch with quantize and convert, 32768 tokens, BF16 / MXFP4": (3.0, Verdict.AIM),
        "dispatch with quantize and convert, 32768 tokens, FP8 / MXFP4": (1.5, Verdict.REACHED),
        "layer forward + backward, 32768 tokens, BF16 / MXFP4": (3.0, Verdict.AIM),
    }
    assert {name: (f.value, f.verdict) for name, f in figures.items() if f.target} == want
    best = "dispatch with quantize and convert, 32768 tokens, each in its best number of chunks"
    assert figures[f"{best}, BF16 / MXFP4"].value == 1.5
    assert figures["layer's peak memory above weights, 32768 tokens, MXFP4 / BF16"].value == pytest.approx(1 / 3)
    assert report_of(us=(15.0, 12.0, 10.0)).verdicts().count(Verdict.MISSED) == 2
    other = [f for f in report_of(tokens=4096).figures if f.target]
    assert [f.name.split(",")[0] for f in other] == ["bytes on the wire"] * 2


@pytest.mark.parametrize("columns", [80, 110, 160])
def test_no_width_cuts_a_figure(columns, monkeypatch):
    report = report_of(us=(9241.0, 6194.0, 3651.0))
    parts = {"quantize": 144.0, "pack": 1834.0, "all-to-all": 5577.0, "regroup": 613.0, "convert": 786.0}
    report.dispatches[0] = replace(report.dispatches[0], parts=parts, bytes_to_others=1_879_048_192)
    monkeypatch.setattr("mxsim.bench.ep.run", lambda *_, **__: report)
    lines = _run(columns=columns).stdout.splitlines()
    assert [line for line in lines if len(line.rstrip()) > columns] == []
    assert not any("…" in line for line in lines)
    (row,) = (line.split() for line in lines if "5.577" in line)
    assert row[:11] == ["32768", "BF16", "1", "14336", "1879.0", "0.144", "1.834", "5.577", "0.613", "0.786", "9.241"]
    words = set(" ".join(lines).split())
    for figure in report.figures:
        assert words >= {*figure.name.split(), f"{figure.value:.3f}"}, figure.name


def test_tables_and_status(monkeypatch):
    monkeypatch.setattr("mxsim.bench.ep.run", lambda *_, **__: report_of())
    result = _run()
    assert result.exit_code == 0
    for text in ("at least, aim", "5 of 5 figures reached, 4 of them with the aim", "GB peak", "2 x H200"):
        assert text in result.stdout, text
    monkeypatch.setattr("mxsim.bench.ep.run", lambda *_, **__: report_of(problem="rank 1: y differ"))
    result = _run()
    assert result.exit_code == 1
    assert "MXFP4, 1 chunks: rank 1: y differ" in result.stdout

    def fail(*_, **__):
        raise RuntimeError("bench ep: a process failed")

    monkeypatch.setattr("mxsim.bench.ep.run", fail)
    result = _run()
    assert result.exit_code == 1
    assert result.stderr == "mxsim: bench ep: a process failed\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "cpu", "--ranks", "1"], "1 rank, needed 2 or more"),
        (["--device", "cpu", "--ranks", "3"], "3 ranks do not divide 8 experts"),
        (["--device", "tpu"], "needed cpu or cuda"),
        (["result.json"], "needed --json result.json"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("recipe", [Recipe.BF16, Recipe.FP8, Recipe.MXFP4], ids=lambda r: r.name)
def test_the_check_sees_a_wrong_result(recipe, tmp_path, monkeypatch):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert check(recipe, 2, torch.device("cpu")).problem == ""
        routed = ExpertParallel.routed
        monkeypatch.setattr(ExpertParallel, "routed", lambda *args: 1.02 * routed(*args))
        problem = check(recipe, 1, torch.device("cpu")).problem
        assert problem.startswith("rank 0: y, dx")
    finally:
        torch.distributed.destroy_process_group()


def test_the_slowest_rank_counts_in_every_sample():
    """Two ranks, two samples of two parts: ends (1, 5) and (2, 3), then (2, 4) and (1, 9)."""
    first = [([1.0, 5.0], True), ([2.0, 4.0], True)]
    second = [([2.0, 3.0], True), ([1.0, 9.0], False)]
    times = _slowest([first, second])
    assert times.parts == (2.0, (3.0 + 7.0) / 2)
    assert (times.us, times.min_us, times.max_us, times.num_samples) == (7.0, 5.0, 9.0, 2)
    assert not times.is_queue_full
