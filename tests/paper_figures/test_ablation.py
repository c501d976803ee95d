"""The ablation: what the docstring claims holds on the committed table, which is that of the runs and gradients."""

import csv
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pandas as pd
import pytest

from paper_figures import fig_ablation
from paper_figures.fig_ablation import ANSWERS, GRADIENTS, NOISE, QUESTIONS, RUNS, compute, draw
from paper_figures.files import DATA, NotMeasured

TABLE = pd.read_csv(DATA / "ablation.csv")
SEEDS = (0, 1)
DOCUMENTS = {(r, s): json.loads((RUNS / f"{r}-seed{s}" / "run.json").read_text()) for r in ANSWERS for s in SEEDS}
MEASURED = json.loads(GRADIENTS.read_text())
FP4_GRADIENTS = ("mxfp4-gradients", "mxfp4-gradients-stochastic")
FP8_GRADIENTS = [recipe for recipe in ANSWERS if recipe != "bf16" and recipe not in FP4_GRADIENTS]
STOCHASTIC = ("mxfp4-stochastic", "mxfp4-gradients-stochastic")
TO_NEAREST = [recipe for recipe in ANSWERS if recipe not in STOCHASTIC]


def deviation(recipe, seed, quantity="validation loss deviation", of="loss"):
    rows = TABLE[(TABLE["recipe"] == recipe) & (TABLE["seed"] == str(seed)) & (TABLE["quantity"] == quantity)]
    return rows[rows["of"] == of]["value"].item()


def of_gradient(recipe, quantity="gradient error", of="all", choices="own", num_draws=1):
    rows = TABLE[(TABLE["recipe"] == recipe) & (TABLE["quantity"] == quantity) & (TABLE["of"] == of)]
    return rows[(rows["choices"] == choices) & (rows["num_draws"] == num_draws)]["value"].item()


def csv_rows(recipe, seed, name):
    with (RUNS / f"{recipe}-seed{seed}" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def layers_of(recipe, figure):
    """By choices, group and layer (None: all), of one draw, from the file itself."""
    rows = [row for row in MEASURED["rows"] if row["recipe"] == recipe and row["num_averaged"] == 1]
    return {(row["choices"], row["group"], row["layer"]): row[figure] for row in rows}


# ---- what was measured ----


def test_the_runs_differ_in_recipe_and_seed_alone():
    assert {path.parent.name for path in RUNS.glob("*/run.json")} == {f"{r}-seed{s}" for r, s in DOCUMENTS}
    configs = [{k: v for k, v in d["config"].items() if k not in ("recipe", "seed")} for d in DOCUMENTS.values()]
    assert configs.count(configs[0]) == len(configs) == 28
    for what in ("corpus", "num_parameters", "steps_done", "status", "final_steps"):
        assert len({json.dumps(d[what]) for d in DOCUMENTS.values()}) == 1
    for what in ("sources_sha256", "kernel_sources_sha256", "device", "torch"):
        assert len({d["provenance"][what] for d in DOCUMENTS.values()}) == 1
    assert all((d["config"]["recipe"], d["config"]["seed"]) == run for run, d in DOCUMENTS.items())
    first = configs[0]
    assert (first["steps"], DOCUMENTS["bf16", 0]["status"]) == (400, "finished")
    assert round(first["steps"] * first["batch_size"] * first["sequence_length"] / 1e6, 1) == 26.2


def test_the_gradients_are_of_the_same_model_and_recipes():
    config = {k: v for k, v in MEASURED["config"].items() if k != "checkpoint_every"}
    assert config == {k: v for k, v in DOCUMENTS["bf16", 0]["config"].items() if k != "checkpoint_every"}
    assert MEASURED["corpus"]["sha256"] == DOCUMENTS["bf16", 0]["corpus"]["sha256"]
    assert (MEASURED["checkpoint_step"], MEASURED["num_tokens"], MEASURED["reference"]) == (400, 65_536, "fp32")
    assert {r: d["recipe"] for (r, _), d in DOCUMENTS.items()} == MEASURED["recipes"]


def test_the_recipes_are_the_library_s_and_each_changes_what_its_question_asks():
    pytest.importorskip("torch")
    from mxsim.train.recipes import RECIPES

    assert list(RECIPES) == list(ANSWERS)
    fields = {
        "scale rule": {"scale_rule"},
        "to FP8": {"headroom", "conversion"},
        "stored in MXFP4": {"stored_fp4"},
        "rounding": {"rounding"},
        "gradients": {"gradients", "rounding"},
    }
    for question, (_, answers) in QUESTIONS.items():
        for recipe in answers if question != "presets" else ():
            changed = {
                name
                for name in ("compute", *set().union(*fields.values()))
                if getattr(RECIPES[recipe], name) != getattr(RECIPES["mxfp4"], name)
            }
            assert changed <= fields[question]
            assert changed
    assert QUESTIONS["scale rule"][0] == RECIPES["mxfp4"].scale_rule.name
    assert f"headroom {RECIPES['mxfp4'].headroom}" in QUESTIONS["to FP8"][0]


@pytest.mark.parametrize("run", DOCUMENTS, ids=lambda run: f"{run[0]}-{run[1]}")
def test_the_logs_name_no_place_of_a_machine(run):
    assert not [word for word in json.dumps(DOCUMENTS[run]).replace('"', " ").split() if word.startswith(("/", "~"))]


# ---- the table is that of the files ----


def test_the_final_loss_is_the_mean_of_the_last_evaluations():
    for (recipe, seed), document in DOCUMENTS.items():
        evaluated = [
            float(row["validation_loss"])
            for row in csv_rows(recipe, seed, "log")
            if int(row["step"]) > 380 and row["validation_loss"]
        ]
        assert len(evaluated) == 5
        assert math.isclose(document["final_validation_loss"], sum(evaluated) / 5, rel_tol=1e-12)
        assert deviation(recipe, seed, "validation loss") == document["final_validation_loss"]


def test_deviations_are_against_bf16_of_the_same_seed():
    for (recipe, seed), document in DOCUMENTS.items():
        for quantity, key in (("validation", "final_validation_loss"), ("training", "final_train_loss")):
            by_hand = 100 * (document[key] - DOCUMENTS["bf16", seed][key]) / DOCUMENTS["bf16", seed][key]
            assert deviation(recipe, seed, f"{quantity} loss deviation") == pytest.approx(by_hand, abs=1e-10)
    for recipe in ANSWERS:
        mean = statistics.fmean(deviation(recipe, seed) for seed in SEEDS)
        assert deviation(recipe, "mean") == pytest.approx(mean, abs=1e-12)


def test_gradients_are_those_of_the_file():
    found = defaultdict(list)
    for row in MEASURED["rows"]:
        if row["layer"] is None:
            key = (row["recipe"], row["group"], row["choices"], row["num_averaged"])
            found[key].append((100 * row["relative_error"], 100 * row["bias"]))
    for (recipe, group, choices, num_draws), ((error, bias),) in found.items():
        assert of_gradient(recipe, "gradient error", group, choices, num_draws) == pytest.approx(error, rel=1e-12)
        assert of_gradient(recipe, "gradient bias", group, choices, num_draws) == pytest.approx(bias, rel=1e-12)
    assert len(TABLE[TABLE["quantity"] == "gradient error"]) == len(found)


def test_only_what_draws_has_a_mean_of_draws():
    several = TABLE[TABLE["num_draws"] > 1]
    assert set(several["recipe"]) == set(STOCHASTIC)
    assert set(several["num_draws"]) == {MEASURED["num_draws"]} == {8}
    assert set(several["choices"]) == {"own", "reference"}


def test_speed_is_not_in_the_table():
    assert set(TABLE["quantity"]) == {
        "validation loss",
        "validation loss deviation",
        "training loss deviation",
        "gradient norm deviation",
        "mean SQNR of the layers",
        "inexact column blocks, worst layer",
        "gradient error",
        "gradient bias",
        NOISE,
    }


# ---- loss ----


def test_the_noise_of_the_loss():
    """Least squares: what a recipe and a seed explain, and what is left of a run."""
    assert len(FP8_GRADIENTS) == 11
    design = np.array([[float(r == row) for r in range(11)] + [float(seed)] for row in range(11) for seed in SEEDS])
    values = np.array([deviation(recipe, seed) for recipe in FP8_GRADIENTS for seed in SEEDS])
    left = values - design @ np.linalg.lstsq(design, values)[0]
    noise = math.sqrt((left**2).sum() / (22 - np.linalg.matrix_rank(design)))
    assert deviation("pooled", "all", NOISE) == pytest.approx(noise, rel=1e-9)
    assert [round(x, 2) for x in (noise, 2 * noise)] == [0.47, 0.93]
    seeds = [DOCUMENTS["bf16", seed]["final_validation_loss"] for seed in SEEDS]
    assert round(100 * abs(seeds[1] / seeds[0] - 1), 2) == 1.13


def test_only_fp4_gradients_are_told_from_noise():
    stats = pytest.importorskip("scipy.stats")
    noise = deviation("pooled", "all", NOISE)
    error = math.sqrt(noise**2 / 2 + noise**2 / 2)  # of a mean of two runs, less the mean of BF16's
    means = {recipe: deviation(recipe, "mean") for recipe in ANSWERS if recipe != "bf16"}
    assert [round(means[recipe], 2) for recipe in FP4_GRADIENTS] == [1.93, 1.36]
    assert [round(means[recipe] / error, 1) for recipe in FP4_GRADIENTS] == [4.2, 2.9]
    assert all(deviation(recipe, seed) > 0.8 for recipe in FP4_GRADIENTS for seed in SEEDS)
    training = [
        statistics.fmean(deviation(recipe, seed, "training loss deviation") for seed in SEEDS)
        for recipe in FP4_GRADIENTS
    ]
    assert [round(x, 2) for x in training] == [1.93, 1.39]

    eleven = statistics.fmean(means[recipe] for recipe in FP8_GRADIENTS)
    of_difference = noise * math.sqrt(1 / 2 + 1 / 22)
    assert [round(means[recipe] - eleven, 2) for recipe in FP4_GRADIENTS] == [1.79, 1.22]
    assert [round((means[recipe] - eleven) / of_difference, 1) for recipe in FP4_GRADIENTS] == [5.2, 3.5]
    assert all(means[recipe] - eleven > stats.t.ppf(0.995, 10) * of_difference for recipe in FP4_GRADIENTS)

    assert max(abs(means[recipe]) for recipe in FP8_GRADIENTS) < 2 * error
    largest = ("mxfp4-rceil", "mxfp4-stochastic")
    assert [round(means[recipe], 2) for recipe in largest] == [0.68, 0.67]
    assert [round(means[recipe] / error, 1) for recipe in largest] == [1.5, 1.4]
    assert round(max(abs(means[recipe]) for recipe in set(FP8_GRADIENTS) - set(largest)), 2) == 0.26


def test_fp4_gradients_against_the_same_recipe_with_fp8_ones():
    error = deviation("pooled", "all", NOISE)  # two means of two runs
    for recipe, base, percent, errors in (("mxfp4-gradients", "mxfp4", 1.82, 3.9), (*reversed(STOCHASTIC), 0.69, 1.5)):
        differences = [deviation(recipe, seed) - deviation(base, seed) for seed in SEEDS]
        assert min(differences) > 0
        assert round(statistics.fmean(differences), 2) == percent
        assert round(statistics.fmean(differences) / error, 1) == errors


# ---- gradient ----


def test_even_errs_the_least_and_biases_cancel():
    errors = [round(of_gradient(recipe), 1) for recipe in ("mxfp4", "mxfp4-rceil", "mxfp4-floor")]
    assert errors == [22.7, 23.8, 34.5]
    by_reference = [of_gradient(r, choices="reference") for r in ("mxfp4", "mxfp4-rceil", "mxfp4-floor")]
    assert by_reference == sorted(by_reference)
    groups = ("all", "routed w2", "attention")
    biases = {
        r: [round(of_gradient(r, "gradient bias", group), 2) for group in groups] for r in ("mxfp4", "mxfp4-floor")
    }
    assert biases == {"mxfp4": [-0.03, -3.74, 0.88], "mxfp4-floor": [2.31, -6.73, 4.05]}
    assert round(of_gradient("another batch")) == 132


def test_floor_errs_the_most_in_every_group_and_layer():
    floor = layers_of("mxfp4-floor", "relative_error")
    assert len(floor) == 2 * (8 + 6 * 7)
    for recipe in TO_NEAREST:
        if recipe != "mxfp4-floor":
            other = layers_of(recipe, "relative_error")
            assert all(floor[place] > other[place] for place in floor), recipe


def test_headroom_0_and_the_way_through_bf16_change_next_to_nothing_of_the_gradient():
    changes = [
        abs(of_gradient(r, choices=choices) - of_gradient("mxfp4", choices=choices))
        for r in ("mxfp4-headroom0", "mxfp4-through-bf16")
        for choices in ("own", "reference")
    ]
    assert round(changes[0], 2) == 0.03
    assert max(changes[:2]) < 0.04
    assert max(changes[2:]) < 1e-5


def test_through_bf16_trains_the_same_at_first():
    for seed in SEEDS:
        losses = [csv_rows(recipe, seed, "log") for recipe in ("mxfp4", "mxfp4-through-bf16")]
        same = [int(a["step"]) for a, b in zip(*losses, strict=True) if a["train_loss"] == b["train_loss"]]
        assert same == list(range(10, 221, 10))


def test_headroom_0_makes_column_blocks_inexact():
    def worst(recipe, seed):
        rows = [row for row in csv_rows(recipe, seed, "diagnostics") if row["step"] == "400"]
        shares = {row["activation"]: [] for row in rows}
        for row in rows:
            assert row["inexact_rows"] in ("", "0.0")
            shares[row["activation"]].append(float(row["inexact_columns"] or "nan"))
        assert max(shares["expert_input"]) == 0
        return 100 * max(shares["down_input"])

    for recipe, percent in (("mxfp4-headroom0", [5.7, 6.3]), ("mxfp4", [0.0, 0.01])):
        found = [worst(recipe, seed) for seed in SEEDS]
        assert [round(x, 2 if recipe == "mxfp4" else 1) for x in found] == percent
        for seed, value in zip(SEEDS, found, strict=True):
            in_table = deviation(recipe, seed, "inexact column blocks, worst layer", "down_input")
            assert in_table == pytest.approx(value, rel=1e-12)


def test_errors_of_what_is_stored_add_in_squares():
    recipes = ("fp8", "mxfp4-expert-input", "mxfp4-down-input", "mxfp4-swiglu-input", "mxfp4")
    fp8, *alone, whole = (of_gradient(recipe) for recipe in recipes)
    assert [round(x, 1) for x in (fp8, *alone, whole)] == [8.2, 15.7, 15.8, 9.6, 22.7]
    assert round(math.sqrt(fp8**2 + sum(x**2 - fp8**2 for x in alone)), 1) == 21.3


def test_one_draw_is_as_wrong_as_ties_to_even_and_a_mean_of_draws_is_not():
    assert round(of_gradient("mxfp4-stochastic"), 1) == 22.6
    assert round(of_gradient("mxfp4-stochastic", num_draws=8), 1) == 12.9
    assert [round(of_gradient(r, of="routed w1"), 1) for r in ("mxfp4-stochastic", "mxfp4")] == [34.8, 28.5]


def test_what_stochastic_rounding_costs():
    cost = []
    for seed, activation in itertools.product(SEEDS, ("expert_input", "swiglu_input", "down_input")):
        means = []
        for recipe in ("mxfp4", "mxfp4-stochastic"):
            rows = csv_rows(recipe, seed, "diagnostics")
            chosen = [r for r in rows if (r["step"], r["activation"], r["is_stored"]) == ("400", activation, "True")]
            assert len(chosen) == 6
            means.append(statistics.fmean(float(row["sqnr_db"]) for row in chosen))
            in_table = deviation(recipe, seed, "mean SQNR of the layers", activation)
            assert in_table == pytest.approx(means[-1], rel=1e-12)
        cost.append(means[0] - means[1])
    assert (round(min(cost), 1), round(max(cost), 1)) == (3.0, 3.4)


def test_only_what_is_stored_has_an_sqnr():
    rows = TABLE[TABLE["quantity"] == "mean SQNR of the layers"]
    stored = rows.groupby("recipe")["of"].agg(lambda of: sorted(set(of))).to_dict()
    both = ["down_input", "expert_input"]
    assert stored == {
        recipe: {
            "mxfp4-expert-input": ["expert_input"],
            "mxfp4-swiglu-input": ["swiglu_input"],
            "mxfp4-down-input": ["down_input"],
            "mxfp4-gemm-inputs": both,
        }.get(recipe, [*both, "swiglu_input"])
        for recipe in ANSWERS
        if recipe not in ("bf16", "fp8")
    }


# ---- gradient against loss ----


def test_the_error_of_the_gradient_does_not_order_the_loss():
    assert max(ANSWERS, key=of_gradient) == "mxfp4-floor"
    assert round(deviation("mxfp4-floor", "mean"), 2) == -0.15
    assert max(ANSWERS, key=lambda recipe: deviation(recipe, "mean")) == "mxfp4-gradients"
    added = [
        math.sqrt(of_gradient("mxfp4-gradients", of=of) ** 2 - of_gradient("mxfp4", of=of) ** 2)
        for of in ("all", "routed w1", "routed w2")
    ]
    assert [round(x, 1) for x in added] == [6.0, 12.5, 10.0]


def test_fp4_gradients_shorten_the_gradient():
    for recipe, base, percent in (("mxfp4-gradients", "mxfp4", 2.2), (*reversed(STOCHASTIC), 1.2)):
        bias, of_base = (layers_of(name, "bias") for name in (recipe, base))
        by_layer = [bias["own", "routed w1", layer] - of_base["own", "routed w1", layer] for layer in range(6)]
        assert max(by_layer) < 0
        assert by_layer == sorted(by_layer)  # most in the first
        whole = [bias["own", "all", layer] - of_base["own", "all", layer] for layer in range(6)]
        assert max(whole) < 0
        assert round(100 * (of_base["own", "routed w1", None] - bias["own", "routed w1", None]), 1) == percent
        if recipe == "mxfp4-gradients":
            assert round(-100 * by_layer[0], 1) == 3.4
    shortened = [of_gradient(r, "gradient bias", "routed w2") for r in ("mxfp4-floor", "mxfp4-gradients")]
    assert [round(x, 1) for x in shortened] == [-6.7, -5.2]


def test_the_norm_of_the_gradient_in_the_second_half():
    def norm(recipe, seed):
        rows = csv_rows(recipe, seed, "log")
        return statistics.fmean(float(row["grad_norm"]) for row in rows if int(row["step"]) > 200)

    found = {}
    for recipe, seed in DOCUMENTS:
        found[recipe, seed] = 100 * (norm(recipe, seed) / norm("bf16", seed) - 1)
        in_table = deviation(recipe, seed, "gradient norm deviation", "all")
        assert in_table == pytest.approx(found[recipe, seed], abs=1e-9)
    assert [round(found["mxfp4-gradients", seed], 1) for seed in SEEDS] == [13.7, 5.8]
    assert [round(found["mxfp4-gradients-stochastic", seed], 1) for seed in SEEDS] == [2.5, 4.1]
    others = [found[recipe, seed] for recipe in FP8_GRADIENTS for seed in SEEDS]
    assert [round(min(others), 1), round(max(others), 1)] == [-1.7, 3.5]


# ---- picture, table of the README, bad input ----


def test_the_picture_has_a_row_for_each_recipe_and_the_band_of_noise():
    losses, errors, biases = draw(TABLE).axes
    labels = [label.get_text() for label in losses.get_yticklabels()]
    assert len(labels) == len(ANSWERS) + len(QUESTIONS) - 1
    places = dict(zip(labels, losses.get_yticks(), strict=True))
    assert len(places) == len(labels)
    places_of_recipes = {
        recipe: places["MXFP4, as in brackets" if recipe == "mxfp4" else answer] for recipe, answer in ANSWERS.items()
    }
    for recipe, place in places_of_recipes.items():
        for axes, quantity in ((errors, "gradient error"), (biases, "gradient bias")):
            (bar,) = (bar for bar in axes.patches if bar.get_y() + bar.get_height() / 2 == pytest.approx(place))
            assert bar.get_width() == pytest.approx(of_gradient(recipe, quantity))
        if recipe != "bf16":
            dots = {
                line.get_xdata()[0]
                for line in losses.lines
                if line.get_marker() in ("o", "|") and line.get_ydata()[0] == pytest.approx(place)
            }
            assert dots == {deviation(recipe, seed) for seed in (*SEEDS, "mean")}
    for axes, marker, recipes, where in (
        (errors, "o", ANSWERS, {"choices": "reference"}),
        (errors, "d", STOCHASTIC, {"num_draws": 8}),
        (biases, "<", ANSWERS, {"quantity": "gradient bias", "of": "routed w1"}),
        (biases, "s", ANSWERS, {"quantity": "gradient bias", "of": "routed w2"}),
        (biases, "x", ANSWERS, {"quantity": "gradient bias", "of": "attention"}),
    ):
        (line,) = (line for line in axes.lines if line.get_marker() == marker)
        want = [(of_gradient(recipe, **where), places_of_recipes[recipe]) for recipe in recipes]
        assert line.get_xydata().tolist() == [list(pair) for pair in want]
    (band,) = losses.patches
    assert band.get_x() == -band.get_width() / 2
    noise = deviation("pooled", "all", NOISE)
    assert band.get_width() == pytest.approx(4 * noise)


def test_the_table_of_the_readme():
    command = [sys.executable, str(DATA.parents[1] / "benchmarks/readme_table.py"), "ablation"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "26 M tokens a run" in text
    assert "standard deviation of 0.47 %" in text
    assert "two standard errors of a mean against BF16 are 0.93 %" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    lines = {label: cells for label, _, *cells in rows[2:]}
    assert len(lines) == len(ANSWERS)
    assert lines["MXFP4"] == ["+0.32 %", "-0.08 %", "+0.12 %", "22.7 %", "28.5 %"]
    assert lines["scale rule: FLOOR"] == ["-0.11 %", "-0.19 %", "-0.15 %", "34.5 %", "34.4 %"]
    assert lines["rounding: stochastic"][-2:] == ["22.6 % (12.9 %)", "34.8 % (17.9 %)"]
    assert lines["gradients: MXFP4, all stochastic"] == [
        "+0.88 %",
        "+1.84 %",
        "+1.36 %",
        "24.5 % (13.4 %)",
        "39.7 % (19.3 %)",
    ]


@pytest.fixture
def runs(tmp_path):
    return shutil.copytree(RUNS, tmp_path / "runs")


def test_what_is_not_measured_is_said(tmp_path):
    for lacking in ({"measured": tmp_path / "none"}, {"gradients": tmp_path / "none.json"}):
        with pytest.raises(NotMeasured, match=r"mxsim train --recipe R .*gradient_error\.py"):
            compute(tmp_path, **lacking)


def test_runs_without_bf16_are_refused(tmp_path, runs):
    shutil.rmtree(runs / "bf16-seed1")
    with pytest.raises(ValueError, match="has a run of seed 1, and BF16 has none"):
        compute(tmp_path, measured=runs)


def test_runs_of_other_recipes_are_refused(tmp_path, runs):
    for seed in SEEDS:
        shutil.rmtree(runs / f"mxfp4-rceil-seed{seed}")
    with pytest.raises(ValueError, match="compute: runs are of the recipes"):
        compute(tmp_path, measured=runs)


@pytest.mark.parametrize(("place", "value"), [(("config", "steps"), 500), (("status",), "interrupted")])
def test_runs_that_were_trained_otherwise_are_refused(tmp_path, runs, place, value):
    path = runs / "fp8-seed1" / "run.json"
    document = json.loads(path.read_text())
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="the run of fp8, seed 1, was not trained as BF16's, or not to its end"):
        compute(tmp_path, measured=runs)


def test_scatter_is_what_rows_and_columns_do_not_explain():
    assert fig_ablation._scatter([[1.0, 3.0], [5.0, 5.0]]) == 1.0
    assert fig_ablation._scatter([[1.0, 2.0, 5.0], [4.0, 5.0, 8.0]]) == pytest.approx(0, abs=1e-12)
    assert fig_ablation._scatter([[0.0, 3.0], [1.0, 1.0], [2.0, 2.0]]) == pytest.approx(math.sqrt(3 / 2))
