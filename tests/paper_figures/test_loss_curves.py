"""Figure 5: the committed logs give the numbers that are claimed, and training anew gives a table of the same kind."""

import csv
import json
import math
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from paper_figures import fig5_loss_curves
from paper_figures.fig5_loss_curves import MEASURED, PAPER, RUNS, SEEDS, compute, draw, final_deviations
from paper_figures.files import DATA

TABLE = pd.read_csv(DATA / "loss_curves.csv")


def cells(recipe, seed, quantity):
    """By step."""
    is_of = (TABLE["recipe"] == recipe) & (TABLE["seed"] == seed) & (TABLE["quantity"] == quantity)
    return TABLE[is_of].set_index("step")["value"]


def run_json(recipe, seed):
    return json.loads((MEASURED / f"{recipe}-seed{seed}" / "run.json").read_text())


def log(recipe, seed, folder=MEASURED):
    with (folder / f"{recipe}-seed{seed}" / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_runs_differ_in_recipe_and_seed_alone():
    documents = {run: run_json(*run) for run in RUNS}
    assert {path.parent.name for path in MEASURED.glob("*/run.json")} == {
        f"{recipe}-seed{seed}" for recipe, seed in RUNS
    }
    configs = [{k: v for k, v in d["config"].items() if k not in ("recipe", "seed")} for d in documents.values()]
    assert configs.count(configs[0]) == len(RUNS)
    for what in ("corpus", "num_parameters", "steps_done", "status"):
        assert len({json.dumps(d[what]) for d in documents.values()}) == 1
    assert all((d["config"]["recipe"], d["config"]["seed"]) == run for run, d in documents.items())
    tokens = configs[0]["steps"] * configs[0]["batch_size"] * configs[0]["sequence_length"]
    assert tokens == 100_007_936


@pytest.mark.parametrize("run", RUNS)
def test_the_logs_name_no_place_of_a_machine(run):
    text = json.dumps(run_json(*run))
    assert not [word for word in text.replace('"', " ").split() if word.startswith(("/", "~"))]


@pytest.mark.parametrize("run", RUNS)
def test_means_of_the_last_5_percent_are_those_of_the_run(run):
    document = run_json(*run)
    for kind in ("train", "validation"):
        (mean,) = cells(*run, f"final {'training' if kind == 'train' else kind} loss")
        assert math.isclose(mean, document[f"final_{kind}_loss"], rel_tol=1e-12)
    assert cells(*run, "median tokens a second").tolist() == [document["median_tokens_per_s"]]


def test_runs_of_other_sources_have_the_same_bits():
    """Five runs are of later sources than the first four: the warm-up of the ablation's runs is theirs, bit by bit."""
    shared = [(recipe, seed) for recipe, seed in RUNS if seed < 2]
    sources = set()
    for run in shared:
        longer, shorter = log(*run), log(*run, folder=MEASURED.parent / "ablation_h200")
        warm_up = run_json(*run)["config"]["warmup_steps"]
        pairs = [(a, b) for a, b in zip(longer, shorter, strict=False) if int(a["step"]) <= warm_up]
        assert len(pairs) == 8
        for a, b in pairs:
            for name in ("step", "train_loss", "grad_norm", "learning_rate", "max_load"):
                assert a[name] == b[name]
        sources.add(run_json(*run)["provenance"]["sources_sha256"])
    assert len(sources) == 2


def final_by_hand(recipe, seed):
    rows = [row for row in log(recipe, seed) if int(row["step"]) > 1450 and row["validation_loss"]]
    assert len(rows) == 5
    return sum(float(row["validation_loss"]) for row in rows) / 5


FINAL = {
    "bf16": {1: 0.021, 2: 0.478},
    "fp8": {0: -0.055, 1: -0.534, 2: 0.366},
    "mxfp4": {0: -0.007, 1: 0.648, 2: 0.377},
}


def test_final_deviations_by_hand():
    for recipe, percents in FINAL.items():
        for seed, percent in percents.items():
            base = final_by_hand("bf16", 0 if recipe == "bf16" else seed)
            by_hand = 100 * (final_by_hand(recipe, seed) - base) / base
            (value,) = cells(recipe, seed, "final validation deviation")
            assert value == pytest.approx(by_hand, abs=1e-9)
            assert round(value, 3) == percent


def test_what_the_seeds_say():
    final = final_deviations(TABLE)
    means = {recipe: final[recipe].mean() for recipe in PAPER}
    errors = {recipe: final[recipe].std(ddof=1) / math.sqrt(len(SEEDS)) for recipe in PAPER}
    assert {recipe: round(mean, 2) for recipe, mean in means.items()} == {"fp8": -0.07, "mxfp4": 0.34}
    assert {recipe: round(error, 2) for recipe, error in errors.items()} == {"fp8": 0.26, "mxfp4": 0.19}
    for recipe, paper in PAPER.items():
        assert means[recipe] < paper
        assert abs(means[recipe]) < 2 * errors[recipe]  # not to be told from BF16 ...
        assert abs(means[recipe] - paper) < 2 * errors[recipe]  # ... nor from the paper's deviation
        assert abs(means[recipe]) < final["bf16"].max()
    scatter = math.sqrt(sum(final[recipe].var(ddof=1) for recipe in PAPER) / 2)
    assert round(scatter, 2) == 0.39
    assert math.ceil((2 * scatter / 0.3) ** 2) == 7
    assert max(final[recipe].max() - final[recipe].min() for recipe in PAPER) == pytest.approx(0.90, abs=0.005)


def test_step_times_of_the_recipes_are_within_the_noise_of_each_other():
    def speeds(recipe):
        return [cells(recipe, seed, "median tokens a second").item() for seed in SEEDS]

    assert [round(m / f, 2) for m, f in zip(speeds("mxfp4"), speeds("fp8"), strict=True)] == [1.05, 0.97, 0.98]
    assert sum(speeds("mxfp4")) > 0.95 * sum(speeds("fp8"))
    assert min(speeds("bf16")) > max(speeds("fp8"))


def test_smoothing_weighs_a_row_by_its_steps():
    rows = pd.Series({2: 10.0, 3: 4.0, 5: 1.0, 6: 7.0})  # means of 2, 1, 2 and 1 steps
    smoothed = fig5_loss_curves._smoothed(rows, 3)
    assert math.isnan(smoothed[2])
    assert smoothed.loc[3:].tolist() == [(2 * 10 + 4) / 3, (4 + 2 * 1) / 3, (2 * 1 + 7) / 3]


def test_diagnostics_of_the_stored_activations():
    sqnr = TABLE[TABLE["quantity"] == "sqnr_db"]
    assert (sqnr["recipe"] == "mxfp4").all()
    assert set(sqnr["activation"]) == {"expert_input", "swiglu_input", "down_input"}
    assert set(sqnr["layer"]) == set("012345")
    assert (round(sqnr["value"].min(), 1), round(sqnr["value"].max(), 1)) == (16.1, 21.0)
    assert TABLE.loc[TABLE["quantity"] == "max_spread", "value"].max() == 14
    assert (TABLE.loc[TABLE["quantity"] == "inexact_rows", "value"] == 0).all()
    columns = TABLE[TABLE["quantity"] == "inexact_columns"]
    assert round(columns["value"].max(), 4) == 0.0069
    assert set(columns.loc[columns["value"] > 0, "activation"]) == {"down_input"}


def test_runs_of_other_steps_are_refused(tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(MEASURED, runs)
    path = runs / "fp8-seed0" / "log.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="losses of fp8, seed 0, are of other steps than BF16's"):
        compute(tmp_path, measured=runs)


def test_runs_without_diagnostics_are_refused(tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(MEASURED, runs)
    for path in runs.glob("mxfp4-seed*/diagnostics.csv"):
        path.write_text(path.read_text().splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match=r"no run in .* holds diagnostics of stored activations"):
        compute(tmp_path, measured=runs)


SMALL = "steps=2 batch_size=2 sequence_length=32 eval_sequences=1 final_evals=1 eval_every=0 checkpoint_every=0 "
SMALL += "diagnose_every=1 diagnose_tokens=32 log_every=1 warmup_steps=1 num_layers=1 num_experts=2"


def test_recompute_trains_and_draws(tmp_path):
    pytest.importorskip("torch")
    fields = [argument for field in SMALL.split() for argument in ("--set", field)]
    command = [sys.executable, "-m", "paper_figures.fig5_loss_curves", "--recompute", "tiny", "--out", str(tmp_path)]
    done = subprocess.run([*command, *fields], cwd=DATA.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "loss_curves.csv")
    assert list(table) == list(TABLE)
    trained = list(table[["recipe", "seed"]].drop_duplicates().itertuples(index=False, name=None))
    assert trained == [run for run in RUNS if run[1] in (0, 1)]
    assert set(table["quantity"]) == set(TABLE["quantity"])
    assert (tmp_path / "loss_curves.png").stat().st_size > 10_000
    draw(table)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--set", "steps=3"], "--set needs --recompute"), (["--recompute", "tiny", "--set", "steps=0"], "steps is 0")],
)
def test_bad_arguments_are_refused_in_one_line(arguments, message, tmp_path):
    command = [sys.executable, "-m", "paper_figures.fig5_loss_curves", "--out", str(tmp_path), *arguments]
    done = subprocess.run(command, cwd=DATA.parents[1], capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
