"""`mxsim validate`: exit status, one-line errors, JSON."""

import json
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

from mxsim import kernels
from mxsim.cli import app


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
    assert "equal bit for bit" in result.stdout


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
    assert document["versions"]["torch"] == torch.__version__
    first = document["ops"][0]["first_mismatches"][0]
    assert first["got"].startswith("0x")
    assert first["step"] == "2.4 sign of zero"
    assert sum(document["ops"][0]["mismatches_by_step"].values()) == document["mismatches"]


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
