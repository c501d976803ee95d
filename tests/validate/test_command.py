"""`mxsim validate`: exit status, one-line errors, JSON."""

import io
import json
import shlex
import sys
import types
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import mxsim
from mxsim import kernels
from mxsim.cli import app
from mxsim.kernels import host, simulated
from mxsim.provenance import sources_sha256
from mxsim.validate import OPS, runner
from mxsim.validate.report import OpReport, Report


def _run(*arguments):
    return CliRunner().invoke(app, ["validate", *arguments])


@pytest.fixture
def module(monkeypatch):
    """An importable module with candidates."""
    candidates = types.ModuleType("candidates_under_test")

    def correct(codes, scales):
        return kernels.fp4_to_bf16(codes, scales)

    def wrong(codes, scales):
        return -kernels.fp4_to_bf16(codes, scales)

    candidates.correct, candidates.wrong, candidates.number = correct, wrong, 3
    monkeypatch.setitem(sys.modules, candidates.__name__, candidates)
    return candidates.__name__


def test_the_kernels_give_0():
    result = _run("--op", "fp4_to_bf16", "--device", "cpu", "--quick")
    assert result.exit_code == 0
    first, *_, not_run, last = result.stdout.splitlines()
    assert first == "mxsim.kernels (host build) on cpu against the NumPy simulator, quick"
    assert not_run.startswith("Not run: the CUDA kernels, as ")
    assert last.endswith("s: equal bit for bit")


def test_without_a_host_build_it_says_that_nothing_is_shown(monkeypatch):
    monkeypatch.setattr(host, "backend", lambda: simulated)
    lines = _run("--op", "fp4_to_bf16", "--device", "cpu", "--quick", "--case", "every code").stdout.splitlines()
    assert lines[0].startswith("mxsim.kernels (the simulator, without a host build) on cpu against")
    assert lines[-2].startswith("The simulator was compared with itself. Not run: the CUDA kernels, ")


def test_scaled_mm_on_the_cpu_says_what_stands_for_it():
    result = _run("--op", "scaled_mm", "--device", "cpu", "--quick", "--case", "4x16x128")
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("scaled_mm: "))
    assert line.startswith("scaled_mm: compared were mxsim's two models of it, kernels.fp8_gemm_emulated and ")
    assert "torch's scaled_mm was not run: it needs a GPU of compute capability 9.0" in line


@pytest.mark.parametrize(
    "names, is_hopper, candidate, note",
    [
        (["fp4_to_bf16"], True, "mxsim.kernels (CUDA)", ""),
        (["fp4_to_bf16"], False, "mxsim.kernels (CUDA)", ""),
        ([*OPS], False, "mxsim.kernels (CUDA)", "Not run: torch's scaled_mm, which needs a Hopper GPU"),
        (["scaled_mm"], True, f"torch {torch.__version__}'s scaled_mm", ""),
        (["fp4_to_bf16", "scaled_mm"], True, "mxsim.kernels (CUDA)", ""),
    ],
)
def test_what_runs_on_a_gpu(monkeypatch, names, is_hopper, candidate, note):
    monkeypatch.setattr(runner, "has_scaled_mm", lambda device: is_hopper)
    assert runner._ours(names, torch.device("cuda")) == (candidate, note)


def test_a_mismatch_gives_1(module):
    arguments = ("--op", "fp4_to_bf16", "--device", "cpu", "--case", "every code", "--candidate")
    assert _run(*arguments, f"{module}:correct").exit_code == 0
    result = _run(*arguments, f"{module}:wrong")
    assert result.exit_code == 1
    assert "NUMERICS 3.9 sign" in result.stdout


def test_json(module):
    result = _run("--op", "fp4_to_bf16", "--device", "cpu", "--quick", "--json", "--candidate", f"{module}:wrong")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert document["mismatches"] == document["ops"][0]["mismatches"] > 0
    assert document["elements"] > 10**5
    assert document["versions"]["torch"] == document["provenance"]["torch"] == torch.__version__
    assert document["against"] == "the NumPy simulator"
    first = document["ops"][0]["first_mismatches"][0]
    assert first["got"].startswith("0x")
    assert first["step"] == "2.4 sign of zero"
    assert sum(document["ops"][0]["mismatches_by_step"].values()) == document["mismatches"]


@pytest.mark.parametrize("options", [(), ("--peer", "ml_dtypes")], ids=["ours", "peer"])
def test_json_says_where_when_and_how_it_was_made(monkeypatch, options):
    arguments = ["--op", "bf16_to_fp4_row", "--device", "cpu", "--quick", "--json", "--case", "N(0, 1)", *options]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/mxsim", "validate", *arguments])
    before = datetime.now(UTC).replace(microsecond=0)
    result = _run(*arguments)
    found = json.loads(result.stdout)["provenance"]
    assert before <= datetime.fromisoformat(found["date"]) <= datetime.now(UTC)
    assert found["command"] == shlex.join(["mxsim", "validate", *arguments])
    assert found.keys() >= {"device", "threads", "mxsim", "python"}
    assert found["kernel_sources_sha256"] == sources_sha256()
    assert found["sources_sha256"] == sources_sha256(Path(mxsim.__file__).parent)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--op", "nope"], "op is 'nope'"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--device", "nonsense"], "device is 'nonsense'"),
        (["--device", "cuda:99"], "torch sees no such CUDA device"),
        (["--op", "fp4_to_bf16", "--case", "no such case"], "no case of fp4_to_bf16"),
        (["--candidate", "{m}:correct"], "needs one --op NAME"),
        (["--candidate", "{m}:correct", "--op", "fp4_to_bf16", "--op", "bf16_to_fp8_row"], "needs one --op NAME"),
        (["--candidate", "{m}", "--op", "fp4_to_bf16"], "needed package.module:function"),
        (["--candidate", "{m}:absent", "--op", "fp4_to_bf16"], "absent"),
        (["--candidate", "{m}:number", "--op", "fp4_to_bf16"], "is a int, needed a function"),
        (["--candidate", "no.such.module:f", "--op", "fp4_to_bf16"], "ModuleNotFoundError"),
        (["--candidate", "{m}:correct", "--peer", "torchao", "--op", "fp4_to_bf16"], "exclude each other"),
        (["--peer", "nobody"], "peer is 'nobody'"),
        (["--peer", "ml_dtypes", "--op", "fp4_to_bf16"], "has no fp4_to_bf16"),
        (["--unknown"], "No such option"),
    ],
)
def test_bad_arguments_give_2_and_one_line(module, arguments, message):
    result = _run("--quick", "--device", "cpu", *[a.replace("{m}", module) for a in arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_help_has_an_example():
    result = _run("--help")
    assert result.exit_code == 0
    assert "Example: mxsim validate" in result.stdout


@pytest.mark.parametrize("width", [1, 40, 80])
def test_nothing_of_the_table_is_cut(width):
    ops = [OpReport("bf16_to_fp4_and_fp8_row", 440, 196_870_542), OpReport("fp4_to_bf16", 4, 5, num_mismatches=1)]
    console = Console(width=width, file=io.StringIO())
    console.print(Report("mxsim.kernels", "cpu", "full", ops=ops), soft_wrap=True)
    assert [line.split() for line in console.file.getvalue().splitlines()[1:4]] == [
        ["op", "cases", "elements", "mismatches", "seconds"],
        ["bf16_to_fp4_and_fp8_row", "440", "196,870,542", "0", "0.0", "equal"],
        ["fp4_to_bf16", "4", "5", "1", "0.0", "DIFFERS"],
    ]
