"""`mxsim train`: its files, its words, and one line for whatever cannot be."""

import json
import math

import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

from mxsim.cli import app
from mxsim.train import loop
from tests.train.runs import SMALL

FIELDS = [part for field in [*SMALL, "num_layers=1"] for part in ("--set", field)]


def call(*arguments):
    result = CliRunner().invoke(app, ["train", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_run_and_its_files(tmp_path):
    out = tmp_path / "made" / "here"
    result = call("--recipe", "FP8", "--steps", 4, "--seed", 3, "--out", out, "--device", "cpu", *FIELDS)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Experts in FP8: GEMMs in FP8; ")
    assert "4 steps, 512 tokens (bytes) of the text austen; seed 3" in lines[1]
    assert lines[2].startswith("Last step: training loss ")
    assert "validation loss" in lines[2]
    assert lines[-1] == f"Written into {out}: log.csv, diagnostics.csv, run.json"
    assert sorted(file.name for file in out.iterdir()) == ["diagnostics.csv", "log.csv", "run.json"]
    assert json.loads((out / "run.json").read_text())["config"]["recipe"] == "fp8"
    again = call("--steps", 4, "--out", out)
    assert (again.exit_code, again.stdout) == (2, "")
    assert again.stderr == f"mxsim: {out} holds a run already, needed --resume to go on, or another folder\n"


@pytest.mark.parametrize(
    "steps, said, mean_of", [(1, "1 step", "Last step"), (40, "40 steps", "Mean of the last 2 steps")]
)
def test_one_step_and_several(tmp_path, steps, said, mean_of):
    fields = (*FIELDS, "--set", "linears=recipe", "--set", "checkpoint_every=40")
    lines = call("--recipe", "bf16", "--steps", steps, "--out", tmp_path, *fields).stdout.splitlines()
    assert lines[0].startswith("Experts and other linears in BF16: ")
    assert f"; {said}, {steps * 128:,} tokens" in lines[1]
    assert lines[2].startswith(f"{mean_of}: training loss ")
    assert lines[-1] == f"Written into {tmp_path}: log.csv, diagnostics.csv, run.json, checkpoint.pt"


def test_json_is_what_the_file_holds(tmp_path):
    result = call("--steps", 2, "--out", tmp_path, "--json", "--device", "cpu", *FIELDS)
    document = json.loads(result.stdout)
    assert document == {"out": str(tmp_path), **json.loads((tmp_path / "run.json").read_text())}


def test_resuming_takes_the_runs_own_configuration(tmp_path):
    call("--steps", 2, "--recipe", "bf16", "--out", tmp_path, *FIELDS, "--set", "checkpoint_every=2")
    result = call("--resume", "--out", tmp_path, "--json")
    assert json.loads(result.stdout)["config"]["recipe"] == "bf16"
    result = call("--resume", "--out", tmp_path, "--recipe", "fp8")
    assert (result.exit_code, result.stderr.endswith("its recipe is 'bf16', not 'fp8'\n")) == (2, True)


def test_a_run_that_diverges_has_status_1(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_learning_rate", lambda step, config: math.inf)
    result = call("--steps", 4, "--recipe", "bf16", "--out", tmp_path, *FIELDS)
    assert result.exit_code == 1
    assert "no number any more at step 2" in result.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--recipe", "mxfp5"], "unknown recipe 'mxfp5'; did you mean mxfp4? (known: bf16, fp8, mxfp4, "),
        (["--preset", "huge"], "unknown preset 'huge' (known: tiny, h200)"),
        (["--set", "hidden_size=100"], "hidden_size is 100, needed a multiple of 128 for FP8"),
        (["--set", "width=1"], "unknown field 'width' (known: recipe, "),
        (["--steps", "0"], "steps is 0, needed 1 or more"),
        (["--device", "tpu"], "device is 'tpu', needed cpu or cuda"),
        (["--corpus", "missing.txt"], "cannot read the corpus missing.txt: No such file or directory"),
        (["--steps", "x"], "Invalid value for '--steps': "),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, message):
    result = call("--out", tmp_path / "run", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"mxsim: {message}")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_places_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    result = call("--out", file, "--steps", 1, *FIELDS)
    assert result.exit_code == 2
    assert result.stderr == f"mxsim: cannot write into {file}: File exists\n"


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    result = call("--out", tmp_path / "typo", "--resume")
    assert result.exit_code == 2
    assert "holds no run to go on with" in result.stderr
    assert not (tmp_path / "typo").exists()


def test_a_run_of_another_version_cannot_be_resumed(tmp_path):
    (tmp_path / "run.json").write_text('{"config": {"depth": 3}}')
    result = call("--out", tmp_path, "--resume")
    assert (result.exit_code, "another version of mxsim" in result.stderr) == (2, True)
