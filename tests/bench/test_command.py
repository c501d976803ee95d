"""`mxsim bench`: tables, JSON, exit status, one-line errors."""

import json

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

import mxsim  # noqa: E402
from mxsim import kernels  # noqa: E402
from mxsim.bench import runner  # noqa: E402
from mxsim.bench.cases import OPS, Case, Shape  # noqa: E402
from mxsim.bench.report import Comparison, Copy, Measurement, Overhead, Report  # noqa: E402
from mxsim.bench.runner import Effort  # noqa: E402
from mxsim.bench.targets import OVERHEAD_US, Target  # noqa: E402
from mxsim.bench.timing import Method, Timing  # noqa: E402
from mxsim.cli import app  # noqa: E402


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    tiny = Effort(copy_bytes=2**16, num_samples=2, num_overhead_calls=5)
    monkeypatch.setattr(runner, "_QUICK", tiny)
    monkeypatch.setattr(runner, "cache_bytes", lambda _: 2**16)


def _run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "--quick", "--device", "cpu", *arguments])


def test_tables():
    result = _run("--shape", "64x128", "--shape", "64x128/3")
    assert result.exit_code == 0, result.output
    assert "A copy of" in result.stdout
    assert "Results compared first, bit by bit, with the simulator" in result.stdout
    for text in (*OPS, "64 x 128", "3 experts of", "op is faster", "Python's time of one call"):
        assert text in result.stdout, text
    assert result.stderr == ""


def test_json_in_place_of_the_tables():
    result = _run("--op", "FP4_to_bf16", "--shape", "64x128", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["ok"] is True
    (op,) = document["ops"]
    assert (op["op"], op["shape"], op["rows"], op["columns"]) == ("fp4_to_bf16", "64x128", 64, 128)
    assert op["us"] > 0
    assert op["of_copy"] > 0
    provenance = document["provenance"]
    assert provenance["mxsim"] == mxsim.__version__
    assert provenance["torch"] == torch.__version__
    assert len(provenance["kernel_sources_sha256"]) == 64
    assert {"device", "date", "command", "python", "threads"} <= provenance.keys()


def test_json_into_a_file_beside_the_tables(tmp_path):
    file = tmp_path / "result.json"
    result = _run("--op", "fp4_to_bf16", "--shape", "64x128", "--json", str(file))
    assert result.exit_code == 0
    assert "fp4_to_bf16" in result.stdout
    assert json.loads(file.read_text())["ok"] is True


def test_wrong_results_give_1(monkeypatch):
    right = kernels.fp4_to_bf16
    monkeypatch.setattr(kernels, "fp4_to_bf16", lambda codes, scales: -right(codes, scales))
    result = _run("--op", "fp4_to_bf16", "--shape", "64x128", "--shape", "32x128")
    assert result.exit_code == 1
    assert "fp4_to_bf16 64x128: wrong results, not timed" in result.stdout
    assert "M elements/s" not in result.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--op", "fp4_to_bf15"], "did you mean fp4_to_bf16?"),
        (["--shape", "64"], "shape is '64', needed ROWSxCOLUMNS"),
        (["--shape", "64x100"], "a multiple of 128"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--json", "no/such/folder/x.json"], "no/such/folder/x.json: No such file"),
        (["result.json"], "needed --json result.json"),
        (["--unknown"], "No such option"),
    ],
)
def test_bad_arguments_give_2_and_one_line(arguments, message):
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_no_cuda_device_is_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = _run("--device", "cuda", "--json", str(tmp_path / "x.json"))
    assert result.exit_code == 2
    assert result.stderr == "mxsim: bench: device is 'cuda', but torch sees no CUDA device\n"
    assert list(tmp_path.iterdir()) == []


def test_the_tables_of_a_device(monkeypatch):
    """Hits and misses are said plainly; a missed figure is no failure."""
    timing = Timing(105.0, 104.0, 107.0, Method.GRAPH, 9, 320, is_queue_full=False)
    copy = Copy(2**30, Timing(509.0, 508.0, 512.0, Method.QUEUE, 9, 4))
    ours = Measurement(Case("fp4_row_to_fp8_col", Shape(32768, 7168)), timing, copy, target=Target(0.80, 0.92))
    late = Overhead("bf16_to_fp4_row", 20.0, 3.0, OVERHEAD_US)
    provenance = {"device": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "nvrtc": "13.0"}
    report = Report(
        {**provenance, "torch": "2.11.0", "mxsim": "0.1.0"},
        copy,
        "the host build",
        [ours],
        [Comparison("two steps", 10**9, Timing(367.5, 367.0, 368.0, Method.QUEUE, 9, 4), ours, Target(2.5, 3.5))],
        [late],
    )
    monkeypatch.setattr("mxsim.bench.run", lambda *_, **__: report)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "--device", "cuda"])
    assert result.exit_code == 0
    for text in (
        "NVIDIA H200, driver 580.1, CUDA 13.0, NVRTC 13.0, torch 2.11.0, mxsim 0.1.0",
        "A copy of 1 GiB, read and written: 4.219 TB/s, 509.0 us",
        "0.80, 0.92",
        "waited for Python",
        "3.50x",
        "aim reached",
        "MISSED",
        "2 of 3 figures reached, 1 of them with the aim.",
        "missed: Python time of bf16_to_fp4_row: 20.0 us, at most 15",
    ):
        assert text in result.stdout, text


def test_help_has_an_example():
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    assert "Example: mxsim bench" in result.stdout
