"""Training: the loss falls in every recipe, and a run is a function of its configuration, interrupted or not."""

import csv
import math
import os
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

from mxsim.train import loop  # noqa: E402
from mxsim.train.config import TrainConfig  # noqa: E402
from mxsim.train.corpus import load_corpus  # noqa: E402
from mxsim.train.run_folder import LogRow, RunError, read_log, read_run  # noqa: E402
from tests.train.runs import CORPUS, run, small  # noqa: E402

RECIPES = ["bf16", "fp8", "mxfp4"]
MEASURED_TIME = ("tokens_per_s", "seconds")


def without_time(rows):
    """Rows as text, so that NaN equals NaN."""
    return [repr({k: v for k, v in row._asdict().items() if k not in MEASURED_TIME}) for row in rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """60 steps in each recipe."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    return {recipe: run(small(recipe, "learning_rate=0.003", steps=60), folder / recipe) for recipe in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_falls(runs, recipe):
    """From ln 256 and more to below one bit a byte over guessing among 20 letters."""
    document, rows = runs[recipe]
    assert document["status"] == "finished"
    assert rows[0].train_loss > math.log(256) * 0.8
    assert document["final_train_loss"] < 2.2
    assert document["final_validation_loss"] < 2.2


@pytest.mark.parametrize("recipe, band", [("fp8", 0.02), ("mxfp4", 0.03)])
def test_recipes_stay_near_bf16(runs, recipe, band):
    """Relative deviation of the mean losses of the last 5 %: the bands are for 60 steps of 128 tokens."""
    for name in ("final_train_loss", "final_validation_loss"):
        want = runs["bf16"][0][name]
        assert abs(runs[recipe][0][name] - want) < band * want, name


def test_recipes_begin_with_the_same_weights_and_the_same_text(runs):
    """The first losses differ by quantization alone, and differ."""
    first = [runs[recipe][1][0].train_loss for recipe in RECIPES]
    assert max(first) - min(first) < 0.02
    assert len(set(first)) == len(RECIPES)


def test_the_log_has_a_row_each_log_every_steps_and_where_the_last_steps_begin(runs):
    _, rows = runs["mxfp4"]
    assert [row.step for row in rows] == sorted({*range(2, 61, 2), 57, 58, 59, 60})
    assert [row.step for row in rows if not math.isnan(row.validation_loss)] == [58, 59, 60]
    assert all(row.tokens == row.step * 128 and row.tokens_per_s > 0 for row in rows)
    assert all(0 < row.grad_norm < 100 and 1 <= row.max_load <= 4 for row in rows)
    assert rows[-1].learning_rate == pytest.approx(0.1 * 0.003)
    assert max(row.learning_rate for row in rows) == 0.003


def test_results_are_means_over_the_last_steps(runs):
    document, rows = runs["fp8"]
    assert document["final_steps"] == 3
    last = {row.step: row for row in rows[-3:]}
    assert document["final_train_loss"] == pytest.approx(sum(last[s].train_loss for s in (58, 59, 60)) / 3)
    assert document["final_validation_loss"] == pytest.approx(sum(last[s].validation_loss for s in (58, 59, 60)) / 3)


def test_run_json_says_what_the_run_was(runs):
    document, _ = runs["mxfp4"]
    assert document["recipe"].startswith("MXFP4: GEMMs in FP8; ")
    assert document["linears"].startswith("BF16")
    assert document["corpus"] == {
        "name": "words",
        "sha256": "0" * 64,
        "train_bytes": 20_000,
        "validation_bytes": 2_000,
    }
    assert {"device", "torch", "mxsim", "date", "sources_sha256", "command"} <= document["provenance"].keys()
    assert document["steps_done"] == 60


# ------------------------------------------------------------------------------------------------- the same bits again
@pytest.mark.parametrize("recipe", ["bf16", "mxfp4", "mxfp4-gradients-stochastic"])
def test_a_rerun_gives_the_same_losses(tmp_path, recipe):
    _, first = run(small(recipe), tmp_path / "a")
    _, second = run(small(recipe), tmp_path / "b")
    assert without_time(first) == without_time(second)
    for name in ("diagnostics.csv",):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()
    _, other = run(small(recipe, "seed=1"), tmp_path / "c")
    assert first[0].train_loss != other[0].train_loss


@pytest.mark.parametrize("recipe", ["fp8", "mxfp4-stochastic"])
@pytest.mark.parametrize("stop", [4, 7])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path, recipe, stop):
    """At a row of the log, and between two: the losses since the row before are kept."""
    config = small(recipe)
    _, want = run(config, tmp_path / "whole")
    document, rows = run(config, tmp_path / "parts", interrupt_at=stop)
    assert (document["status"], document["steps_done"], document["signal"]) == ("interrupted", stop, signal.SIGINT)
    assert [row.step for row in rows] == list(range(2, stop + 1, 2))
    document, rows = run(config, tmp_path / "parts", resume=True)
    assert (document["status"], document["resumed_at"]) == ("finished", [stop])
    assert without_time(rows) == without_time(want)
    for name in ("diagnostics.csv",):
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "parts" / name).read_text()
    a, b = (read_state(tmp_path / part) for part in ("whole", "parts"))
    assert a is None
    assert b["step"] == stop


def read_state(folder):
    file = folder / "checkpoint.pt"
    return torch.load(file, weights_only=True) if file.exists() else None


def test_every_tensor_is_the_same_after_resuming(tmp_path):
    """Weights, router biases and both moments, not the losses alone; rows after the checkpoint are dropped."""
    config = small("mxfp4", "checkpoint_every=6")
    run(config, tmp_path / "whole")
    want = read_state(tmp_path / "whole")
    run(config, tmp_path / "parts", interrupt_at=6)
    with (tmp_path / "parts" / "log.csv").open("a") as file:
        file.write("8,1024,1,,1,1,1,1,1\n10,12")  # a crash after the checkpoint, in the middle of a row
    _, rows = run(config, tmp_path / "parts", resume=True)
    assert [row.step for row in rows] == [2, 4, 6, 8, 10, 11, 12]
    got = read_state(tmp_path / "parts")
    assert got["step"] == want["step"] == 12
    assert got["model"].keys() == want["model"].keys()
    assert any("router.bias" in name for name in want["model"])
    for name, value in want["model"].items():
        assert torch.equal(got["model"][name], value), name
    moments = [state["optimizer"]["state"] for state in (got, want)]
    assert moments[0].keys() == moments[1].keys()
    for index, state in moments[1].items():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(moments[0][index][name], value) for name, value in state.items())
    assert torch.equal(got["random_state"], want["random_state"])


def test_resuming_a_finished_run_changes_nothing_but_its_json(tmp_path):
    config = small("fp8", "checkpoint_every=12")
    _, want = run(config, tmp_path)
    document, rows = run(config, tmp_path, resume=True)
    assert document["status"] == "finished"
    assert repr(rows) == repr(want)


def test_resuming_without_a_checkpoint_starts_again(tmp_path):
    config = small("fp8", steps=4)
    _, want = run(config, tmp_path)
    _, rows = run(config, tmp_path, resume=True)
    assert without_time(rows) == without_time(want)


def test_measuring_changes_no_loss(tmp_path):
    """Neither evaluation nor diagnostics draw from training's random numbers."""
    config = small("mxfp4-stochastic", steps=8)
    _, want = run(config, tmp_path / "a")
    _, rows = run(small("mxfp4-stochastic", "eval_every=2", "diagnose_every=1", steps=8), tmp_path / "b")
    assert [row.train_loss for row in rows] == [row.train_loss for row in want]
    assert not math.isnan(rows[0].validation_loss)


@pytest.mark.parametrize(("every", "steps"), [(3, {"3", "6", "7"}), (100, {"7"}), (7, {"7"}), (0, set())])
def test_the_last_step_is_diagnosed_too(tmp_path, every, steps):
    run(small("mxfp4", f"diagnose_every={every}", "num_layers=1", steps=7), tmp_path / "a")
    rows = (tmp_path / "a" / "diagnostics.csv").read_text().splitlines()[1:]
    assert {row.partition(",")[0] for row in rows} == steps


def test_ctrl_c_leaves_a_valid_checkpoint_and_log(tmp_path):
    """SIGINT to the command: status 130, and what resumes ends with the losses of a run that was left alone."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(CORPUS.train.tobytes() * 4)
    fields = ["sequence_length=32", "batch_size=2", "log_every=1", "eval_sequences=2", "num_layers=1", "num_experts=4"]
    common = ["--corpus", str(corpus), "--recipe", "mxfp4", "--device", "cpu"]
    common += ["--steps", "30", *(part for field in fields for part in ("--set", field))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    parts = tmp_path / "parts"
    command = [sys.executable, "-m", "mxsim.cli", "train", *common, "--out", str(parts)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 100
    while not (parts / "log.csv").exists() or (parts / "log.csv").read_text().count("\n") < 4:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert err == "mxsim: interrupted\n"
    assert "to go on: mxsim train --resume --out" in out
    step = read_run(parts)["steps_done"]
    assert 3 <= step < 30
    assert read_log(parts)[-1].step == step
    assert read_state(parts)["step"] == step

    text, config = load_corpus(corpus), TrainConfig(**read_run(parts)["config"])
    _, got = run(config, parts, corpus=text, resume=True)
    _, want = run(config, tmp_path / "whole", corpus=text)
    assert without_time(got) == without_time(want)


# --------------------------------------------------------------------------------------------------------------- errors
def test_a_run_is_not_overwritten(tmp_path):
    config = small("fp8", steps=2)
    run(config, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(RunError, match="holds a run already, needed --resume"):
        run(config, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert before.keys() == {"log.csv", "diagnostics.csv", "run.json"}


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    config = small("fp8", "checkpoint_every=2", steps=2)
    run(config, tmp_path)
    with pytest.raises(RunError, match=r"its learning_rate is 0\.01, not 0\.5"):
        run(config.with_fields(["learning_rate=0.5"]), tmp_path, resume=True)
    with pytest.raises(RunError, match="another text"):
        run(config, tmp_path, resume=True, corpus=CORPUS.__class__("x", CORPUS.train, CORPUS.validation, "1" * 64))
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(RunError, match=r"cannot read .*checkpoint\.pt: "):
        run(config, tmp_path, resume=True)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path, monkeypatch):
    rate = loop._learning_rate
    monkeypatch.setattr(loop, "_learning_rate", lambda step, config: math.nan if step == 5 else rate(step, config))
    document, rows = run(small("bf16"), tmp_path)
    assert (document["status"], document["steps_done"]) == ("diverged", 6)
    assert math.isnan(rows[-1].train_loss)
    assert document["final_validation_loss"] is None


def test_torchs_settings_are_put_back(tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    run(small("bf16", steps=1), tmp_path)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_columns_of_the_log_are_those_of_a_row(tmp_path):
    run(small("bf16", steps=1), tmp_path)
    with (tmp_path / "log.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == LogRow._fields
    assert len(rows) == 1
