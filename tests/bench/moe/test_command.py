"""`mxsim bench moe`: tables, JSON, exit status, one-line errors; and the README's tables of it."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from mxsim.cli import app  # noqa: E402
from mxsim.commands.bench import flops_text, time_text  # noqa: E402

README_TABLE = Path(__file__).parents[3] / "benchmarks/readme_table.py"


def _run(*arguments, columns=200):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["bench", "moe", *arguments])


@pytest.fixture
def found(monkeypatch):
    """What a run finds, instead of running."""

    def put(report):
        monkeypatch.setattr("mxsim.bench.moe.run", lambda *_, **__: report)

    return put


def test_tables_of_a_run_on_the_cpu(cpu_report, found):
    found(cpu_report)
    result = _run("--device", "cpu")
    assert result.exit_code == 0, result.output
    for text in (
        "8 experts, 64 tokens x top-2 = 128 rows",
        "largest relative error: FP8 0.0",
        "Forward + backward, balanced (16 rows an expert)",
        "43.5 kB",
        "Zipf with exponent 1",
        "The step by parts, each on its own, skewed",
        "x: BF16 -> MXFP4, once a token",
        "grouped-linear quantization + conversion, FP8 / MXFP4",
        "One-read FP8 is not beside it: it runs on a CUDA device.",
    ):
        assert text in result.stdout, text
    assert "Python" not in result.stdout
    assert "to reach" not in result.stdout
    assert result.stderr == ""


def test_tables_of_a_device(h200_report, found):
    """What is bound by the host and what is missed is said plainly; neither is a failure."""
    found(h200_report)
    result = _run()
    assert result.exit_code == 0
    for text in (
        "NVIDIA H200, driver 580.1, CUDA 13.0",
        "step after step",
        "Bound by the host: Python takes as long as the device",
        "4 layers, MXFP4",
        "39.000 GB",
        "1.5, 1.7",
        "1.43 to 1.53",
        "aim reached",
        "MISSED",
        "1 of 2 figures reached, 1 of them with the aim.",
    ):
        assert text in result.stdout, text
    bound = [line.split()[0] for line in result.stdout.splitlines() if line.rstrip().endswith("bound by the host")]
    assert bound == ["MXFP4"] * 3


@pytest.mark.parametrize("columns", [80, 110, 160])
@pytest.mark.parametrize("which", ["cpu_report", "h200_report"])
def test_no_width_cuts_a_figure(which, columns, found, request):
    """Times, rates, verdicts and the words of every figure's name are all there; only optional columns are left out."""
    report = request.getfixturevalue(which)
    found(report)
    lines = _run(columns=columns).stdout.splitlines()
    prose = ("Zipf", "Such", "NVIDIA", "AMD", "missed: ")
    assert [line for line in lines if len(line.rstrip()) > columns and not line.strip().startswith(prose)] == []
    assert not any("…" in line for line in lines)
    words = set(" ".join(lines).split())
    for figure in report.figures:
        assert words >= {*figure.name.split(), f"{figure.value:.3f}", *figure.paper.split()[1:2]}, figure.name
    for part in (*report.routings[0].parts, *report.dense):
        assert words >= {*part.name.split(), *time_text(part.timing.us).split()}, part.name
    for step in report.routings[0].steps:
        assert words >= {*step.name.split(), *time_text(step.timing.us).split()}, step.name


def test_json_goes_to_the_terminal_or_into_a_file(cpu_report, found, tmp_path):
    found(cpu_report)
    assert json.loads(_run("--json").stdout) == json.loads(json.dumps(cpu_report.to_json()))
    file = tmp_path / "moe.json"
    result = _run("--json", str(file))
    assert "Forward + backward" in result.stdout
    assert json.loads(file.read_text())["ok"] is True


@pytest.mark.parametrize(
    "per_s, text",
    [(1.2719e15, "1271.9 TFLOP/s"), (1e12, "1.00 TFLOP/s"), (2.6e9, "2.60 GFLOP/s"), (7.95e7, "79.5 MFLOP/s")],
)
def test_rates_have_the_unit_that_suits_them(per_s, text):
    assert flops_text(per_s) == text


def test_a_problem_gives_1(cpu_report, found):
    found(replace(cpu_report, problems=[("MXFP4, balanced", "relative error against BF16: y 2, at most 0.35")]))
    result = _run()
    assert result.exit_code == 1
    assert "MXFP4, balanced: relative error against BF16: y 2, at most 0.35" in result.stdout


def test_a_run_with_nothing_found_prints_what_went_wrong(cpu_report, found):
    failed = [replace(r, checks=[], saved={}, steps=[], parts=[]) for r in cpu_report.routings]
    found(replace(cpu_report, routings=failed, dense=[], figures=[], problems=[("all", "raised it")]))
    result = _run()
    assert result.exit_code == 1
    assert "all: raised it" in result.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "tpu"], "device is 'tpu'"),
        (["--json", "no/such/folder/x.json"], "no/such/folder/x.json: No such file"),
        (["result.json"], "needed --json result.json"),
        (["--op", "fp4_to_bf16"], "No such option"),
        (["a", "b"], "unexpected extra argument"),
    ],
)
def test_bad_arguments_give_2_and_one_line(arguments, message):
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_help_is_its_own():
    result = _run("--help")
    assert result.exit_code == 0
    assert "Example: mxsim bench moe" in result.stdout
    assert "--op" not in result.stdout
    assert "bench moe" in CliRunner().invoke(app, ["--help"]).stdout


# -------------------------------------------------------------------------------------------------------------- README
@pytest.fixture(scope="module")
def readme_table():
    spec = importlib.util.spec_from_file_location("readme_table", README_TABLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_tables_have_times_memory_and_verdicts(h200_report, readme_table):
    document = json.loads(json.dumps(h200_report.to_json()))
    document["routings"][0]["steps"][0]["us"] = 20190.0
    document["routings"][0]["sums_us"]["MXFP4"]["quantize"] = 1000.0
    document["routings"][0]["sums_us"]["MXFP4"]["convert"] = 500.0
    document["routings"][0]["saved_bytes"] = {"BF16": 872_415_232, "FP8": 579_862_528, "MXFP4": 231_735_296}
    lines = readme_table.moe_table(document).splitlines()
    assert lines[0].startswith("NVIDIA H200, driver 580.1")
    assert any(line.startswith("| balanced routing | 20.19 ms | ") for line in lines)
    assert any(line.startswith("| quantize, convert |  | ") and line.endswith("| 1.50 ms |") for line in lines)
    assert "| activations kept for backward | 872 MB | 580 MB | 232 MB |" in lines
    assert "| peak memory of 4 layers above weights and gradients | 5.00 GB |  | 5.00 GB |" in lines
    assert "| quick (balanced), the paper 1.43 to 1.53 | 1.800 | 1.5 | 1.7 | aim reached |" in lines
    assert "| slow | 0.900 | 1 | 1.1 | missed |" in lines
    assert any("dense 0.77" in line for line in lines)
    assert lines[-1].startswith("- Bound by the host: MXFP4 (balanced), MXFP4 (skewed)")
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables} == {5, 6}
