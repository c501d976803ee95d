"""Of the MXFP4 recipe's choices only FP4 gradients cost loss beyond noise; of three scale rules EVEN errs the least.

Loss: 14 recipes, two seeds each, 400 steps (26.2 M tokens); the mean validation loss over the last 5 % of the steps,
computed in the recipe, against BF16 of the same seed, which has the same initial weights and the same order of the
text. It is noisy: of the 11 recipes but BF16 that keep gradients in FP8, a run is off what its recipe and its seed have
in common by a standard deviation of 0.47 %, with 10 degrees of freedom at most (MXFP4 and the way through BF16 are
nearly the same run). A deviation has the noise of two runs, its own and BF16's, hence the mean of two seeds a standard
error of 0.47 %; the band is two of these, 0.93 %. (BF16's own seeds, which share no text order, differ by 1.13 %.) FP4
gradients cost 1.93 %, stochastic ones 1.36 %: 4.2 and 2.9 standard errors, in both seeds, and the training loss says
the same (1.93 and 1.39 %). Against the mean of the 11, from which BF16's noise cancels, they cost 1.79 and 1.22 %, 5.2
and 3.5 standard errors. RCEIL and stochastic rounding, +0.68 and +0.67 %, are 1.5 and 1.4 standard errors away: not
told from noise. The others lie within 0.26 %.

Gradient: the error of the weight gradient against FP32's, |g - r| / |r|, at the same weights (BF16's after 400 steps)
on the same 65,536 tokens, so that no noise of training is in it; other weights or tokens were not tried. EVEN 22.7 %,
RCEIL 23.8 %, FLOOR 34.5 %. The bias along r has opposite signs, which cancel in all: MXFP4 -0.03 %, of which w2 -3.7
and attention +0.9 %; FLOOR +2.3 %, of which w2 -6.7 and attention +4.1 %. Headroom 0 and the way through BF16 change
the error by 0.03 and 0.00 points, and through BF16 the runs log the same losses up to step 220. Trained with headroom
0, up to 5.7 and 6.3 % (by seed) of a layer's FP8 column blocks of the second GEMM's input are inexact, with headroom 6
none and 0.01 %. Stored alone, expert input and second GEMM's input make 15.7 and 15.8 %, SwiGLU's input 9.6 %, FP8
without them 8.2 %: added in squares 21.3 %, and all three make 22.7 %. One draw of stochastic rounding is as wrong
(22.6 %), for the experts' w1 more so (34.8 instead of 28.5 %); the mean of 8 draws is not (12.9 %). Its SQNR of what is
stored is 3.0 to 3.4 dB less.

The gradient's error alone does not predict the loss. Of the recipes that round to nearest FLOOR has the largest in
every group of parameters and every layer, and no loss is seen (-0.15 %). FP4 gradients add, in squares, only 6.0 % in
all, 12.5 % in the routed experts' w1 and 10.0 % in w2, and cost most: 1.82 % more than MXFP4 with FP8 gradients, 3.9
standard errors. (Where both round stochastically they cost 0.69 % more, 1.5 standard errors.) They do shorten the
gradient in every layer beyond what MXFP4 does, most in the first (w1 by 3.4 %, of all layers by 2.2 %; stochastic,
1.2 %), and in the second half of those runs the gradient's norm is 13.7 and 5.8 % above BF16's (stochastic 2.5 and
4.1 %, others -1.7 to 3.5 %). But FLOOR shortens w2 more (by 3.0 % beyond MXFP4, FP4 gradients by 1.4 %), and Adam takes
no notice of a constant factor: why they cost more than their error, these data do not show.

The recipe's defaults follow, where the loss is silent from the error and from what a choice costs: EVEN, the smallest
error of the three rules; headroom 6, the same error and exact up to a spread of 14 octaves; direct conversion, the same
error in one kernel; ties to even, as stochastic rounding costs SQNR and shows no gain; all three activations stored, as
storage is the aim and the loss is within noise; gradients in FP8.

Inputs: benchmarks/results/ablation_h200 (mxsim train --preset h200 --steps 400 --set eval_sequences=256 --recipe R
--seed S) and benchmarks/results/gradient_error_h200.json (benchmarks/gradient_error.py), from H200s. Three runs shared
a GPU: their speed says nothing and is not shown. Any CPU, a second.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mxsim.plotting import FORMAT_COLORS, TEXT_WIDTH, use_theme
from paper_figures.exhibit import Exhibit, Measured
from paper_figures.files import DATA, RESULTS, NotMeasured, write_table

TOPIC = "ablation"
RUNS = RESULTS / "ablation_h200"
GRADIENTS = RESULTS / "gradient_error_h200.json"
PRESETS, FP4_GRADIENTS = "presets", "gradients"
# question -> (MXFP4's answer, recipe -> its own): but for the presets a recipe differs from MXFP4 in this alone
QUESTIONS = {
    PRESETS: ("", {"bf16": "BF16", "fp8": "FP8", "mxfp4": "MXFP4"}),
    "scale rule": ("EVEN", {"mxfp4-floor": "FLOOR", "mxfp4-rceil": "RCEIL"}),
    "to FP8": ("directly, headroom 6", {"mxfp4-headroom0": "headroom 0", "mxfp4-through-bf16": "through BF16"}),
    "stored in MXFP4": (
        "all three",
        {
            "mxfp4-expert-input": "expert input",
            "mxfp4-swiglu-input": "SwiGLU's input",
            "mxfp4-down-input": "second GEMM's input",
            "mxfp4-gemm-inputs": "both GEMMs' inputs",
        },
    ),
    "rounding": ("ties to even", {"mxfp4-stochastic": "stochastic"}),
    FP4_GRADIENTS: ("FP8", {"mxfp4-gradients": "MXFP4", "mxfp4-gradients-stochastic": "MXFP4, all stochastic"}),
}
ANSWERS = {recipe: answer for _, answers in QUESTIONS.values() for recipe, answer in answers.items()}
COLUMNS = ("question", "answer", "recipe", "seed", "quantity", "of", "choices", "num_draws", "value", "device", "torch")
LOSS, ERROR, BIAS = "validation loss deviation", "gradient error", "gradient bias"
NOISE = "standard deviation of a run"


@dataclass(frozen=True)
class Run:
    document: dict[str, Any]
    log: pd.DataFrame
    diagnostics: pd.DataFrame

    @property
    def same_config(self) -> dict[str, Any]:
        return {name: value for name, value in self.document["config"].items() if name not in ("recipe", "seed")}

    @property
    def gradient_norm(self) -> float:
        """The mean over the logged steps of the second half."""
        norms = self.log.loc[self.log["step"] > self.document["config"]["steps"] / 2, "grad_norm"]
        return float(norms.mean())


def compute(folder: Path = DATA, *, measured: Path = RUNS, gradients: Path = GRADIENTS) -> pd.DataFrame:
    """A row for each figure of a recipe: nats a byte, dB, and percent for all others.

    measured: holds a folder for each run, as `mxsim train` writes it. gradients: of benchmarks/gradient_error.py.

    seed: of the run; "mean" over the seeds. of: what a figure is of: the loss, a stored activation or a group of
    parameters, "all" of them. choices: who chose the experts of a gradient. num_draws: gradients averaged.

    Raises:
        NotMeasured: without the runs or the gradients.
        ValueError: for recipes that are not those of QUESTIONS, without BF16, or trained unlike it.
    """
    if not gradients.exists() or not any(measured.glob("*/run.json")):
        raise NotMeasured(
            f"{measured.name} or {gradients.name} is not in {gradients.parent.name}; on a GPU: mxsim train --recipe R "
            "--seed S, benchmarks/gradient_error.py"
        )
    found = _read_runs(measured)
    document = json.loads(gradients.read_text(encoding="utf-8"))
    for name, recipes in (("runs", {recipe for recipe, _ in found}), ("gradients", set(document["recipes"]))):
        if recipes != set(ANSWERS):
            raise ValueError(f"compute: {name} are of the recipes {sorted(recipes)}, needed {sorted(ANSWERS)}")
    rows = [*_rows_of_runs(found), *_rows_of_gradients(document)]
    names = {recipe: (question, answer) for question, (_, of) in QUESTIONS.items() for recipe, answer in of.items()}
    names |= {"pooled": ("noise of the loss", "FP8 gradients"), "another batch": ("noise of the data", "another batch")}
    order = list(names)
    rows.sort(key=lambda row: order.index(row[0]))
    return write_table(pd.DataFrame([(*names[row[0]], *row) for row in rows], columns=COLUMNS), TOPIC, folder)


def _read_runs(folder: Path) -> dict[tuple[str, int], Run]:
    """By recipe and seed."""
    found = {}
    for path in sorted(folder.glob("*/run.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        run = Run(document, *(pd.read_csv(path.parent / f"{name}.csv") for name in ("log", "diagnostics")))
        found[document["config"]["recipe"], document["config"]["seed"]] = run
    for (recipe, seed), run in found.items():
        base = found.get(("bf16", seed))
        if base is None:
            raise ValueError(f"compute: {recipe} has a run of seed {seed}, and BF16 has none to compare it with")
        if run.same_config != base.same_config or run.document["status"] != "finished":
            raise ValueError(f"compute: the run of {recipe}, seed {seed}, was not trained as BF16's, or not to its end")
    return found


def _rows_of_runs(runs: dict[tuple[str, int], Run]) -> Iterator[tuple[Any, ...]]:
    deviations: dict[str, list[float]] = {}
    for (recipe, seed), run in runs.items():
        made = run.document["provenance"]
        for quantity, of, value in _figures(run, runs["bf16", seed]):
            yield recipe, seed, quantity, of, "none", 1, value, made["device"], made["torch"]
            if quantity == LOSS:
                deviations.setdefault(recipe, []).append(value)
    for recipe, values in deviations.items():
        yield recipe, "mean", LOSS, "loss", "none", 1, sum(values) / len(values), made["device"], made["torch"]
    _, of_fp4_gradients = QUESTIONS[FP4_GRADIENTS]
    scatter = _scatter([values for recipe, values in deviations.items() if recipe not in ("bf16", *of_fp4_gradients)])
    yield "pooled", "all", NOISE, "loss", "none", 1, scatter, made["device"], made["torch"]


def _figures(run: Run, base: Run) -> Iterator[tuple[str, str, float]]:
    """Quantity, of what, value; base is BF16's run of the same seed."""
    yield "validation loss", "loss", run.document["final_validation_loss"]
    for quantity, name in ((LOSS, "final_validation_loss"), ("training loss deviation", "final_train_loss")):
        yield quantity, "loss", 100 * (run.document[name] / base.document[name] - 1)
    yield "gradient norm deviation", "all", 100 * (run.gradient_norm / base.gradient_norm - 1)
    last = run.diagnostics[run.diagnostics["step"] == run.diagnostics["step"].max()]
    for activation, layers in last[last["is_stored"]].groupby("activation", sort=False):
        yield "mean SQNR of the layers", str(activation), layers["sqnr_db"].mean()
        if layers["inexact_columns"].notna().all():  # nothing reads SwiGLU's input as FP8
            yield "inexact column blocks, worst layer", str(activation), 100 * layers["inexact_columns"].max()


def _scatter(deviations: list[list[float]]) -> float:
    """Standard deviation of a run: of what is left of a table, recipes by seeds, without its rows' and columns' means.

    All recipes of a seed are compared with one run of BF16, whose noise thus goes with the columns.

    >>> _scatter([[1.0, 3.0], [5.0, 5.0]])
    1.0
    """
    table = np.array(deviations)
    left = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    num_rows, num_columns = table.shape
    return float(np.sqrt((left**2).sum() / ((num_rows - 1) * (num_columns - 1))))


def _rows_of_gradients(measured: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    seed, made = measured["config"]["seed"], measured["provenance"]
    for row in measured["rows"]:
        if row["layer"] is None:
            key = (row["group"], row["choices"], row["num_averaged"])
            for quantity, value in ((ERROR, row["relative_error"]), (BIAS, row["bias"])):
                yield row["recipe"], seed, quantity, *key, 100 * value, made["device"], made["torch"]


# ------------------------------------------------------------------------------------------------------------- picture
def draw(df: pd.DataFrame) -> Figure:
    use_theme()
    places, headings = _places()
    figure = Figure(figsize=(TEXT_WIDTH, 4.5))
    panels = figure.subplots(1, 3, sharey=True, gridspec_kw={"width_ratios": (1.2, 1.2, 1)})
    for axes, draw_panel in zip(panels, (_draw_losses, _draw_errors, _draw_biases), strict=True):
        for place in places.values():
            axes.axhline(place, color="0.93", linewidth=0.6, zorder=-2)
        handles = draw_panel(axes, df, places)
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(-0.03, -0.12), borderaxespad=0, handlelength=1.2)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    panels[0].set_yticks([*places.values(), *headings.values()], [*(_label(recipe) for recipe in places), *headings])
    for label in panels[0].get_yticklabels()[len(places) :]:
        label.set_fontweight("bold")
    panels[0].set_ylim(max(places.values()) + 0.6, min(places.values()) - 0.6)
    return figure


def _places() -> tuple[dict[str, float], dict[str, float]]:
    """Where recipes and the headings of their questions stand, from the top."""
    places, headings, place = {}, {}, 0.0
    for question, (answer_of_mxfp4, answers) in QUESTIONS.items():
        if question != PRESETS:
            headings[f"{question} ({answer_of_mxfp4})"] = place + 0.3
            place += 1.3
        for recipe in answers:
            places[recipe] = place
            place += 1
    return places, headings


def _label(recipe: str) -> str:
    return "MXFP4, as in brackets" if recipe == "mxfp4" else ANSWERS[recipe]


def _color(recipe: str) -> str:
    return FORMAT_COLORS[{"bf16": "BF16", "fp8": "FP8_1X128"}.get(recipe, "MXFP4")]


def _of_gradient(df: pd.DataFrame, quantity: str, of: str, choices: str = "own", *, is_mean: bool = False) -> pd.Series:
    """By recipe; is_mean: of several draws."""
    rows = df[(df["quantity"] == quantity) & (df["of"] == of) & (df["choices"] == choices)]
    return rows[(rows["num_draws"] > 1) == is_mean].set_index("recipe")["value"]


_DOT: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 3.4, "markeredgewidth": 0}
_HOLLOW: dict[str, Any] = _DOT | {"markeredgewidth": 0.8, "markerfacecolor": "white", "color": "black"}
_DIAMOND: dict[str, Any] = _DOT | {"marker": "d", "markersize": 4.5, "color": "black"}
_BAR: dict[str, Any] = {"linestyle": "", "marker": "|", "markersize": 8, "markeredgewidth": 1.8}
_NUMBER: dict[str, Any] = {"va": "center", "fontsize": 5.5}
_PARTS = {"routed w1": ("experts' w1", "<"), "routed w2": ("experts' w2", "s"), "attention": ("attention", "x")}


def _draw_losses(axes: Axes, df: pd.DataFrame, places: dict[str, float]) -> list[Any]:
    rows = df[(df["quantity"] == LOSS) & (df["recipe"] != "bf16")]
    num_seeds = rows["seed"].nunique() - 1
    band = 2 * df.loc[df["quantity"] == NOISE, "value"].item() * (2 / num_seeds) ** 0.5  # of the run, and of BF16's
    axes.axvspan(-band, band, color="0.88", linewidth=0, zorder=-3)
    axes.axvline(0, color="black", linewidth=0.5, zorder=-1)
    for row in rows.itertuples():
        place, color = places[row.recipe], _color(row.recipe)
        axes.plot(row.value, place, color=color, **(_BAR if row.seed == "mean" else _DOT))
        if row.seed == "mean":
            axes.text(2.95, place, f"{row.value:+.2f}", ha="right", **_NUMBER)
    axes.set(xlabel="deviation from BF16 (%)", title="(a) validation loss", xlim=(-1, 3))
    return [
        Line2D([], [], color="0.4", label="a seed", **_DOT),
        Line2D([], [], color="0.4", label="mean of both", **_BAR),
        Patch(color="0.88", linewidth=0, label=f"±2 standard errors ({band:.2f} %)"),
    ]


def _draw_errors(axes: Axes, df: pd.DataFrame, places: dict[str, float]) -> list[Any]:
    own = _of_gradient(df, ERROR, "all")
    for recipe, place in places.items():
        axes.barh(place, own[recipe], 0.5, color=_color(recipe), linewidth=0)
        axes.text(own[recipe] + 0.8, place, f"{own[recipe]:.1f}", **_NUMBER)
    for style, values in (
        (_HOLLOW, _of_gradient(df, ERROR, "all", "reference")),
        (_DIAMOND, _of_gradient(df, ERROR, "all", is_mean=True)),
    ):
        axes.plot(values, [places[recipe] for recipe in values.index], **style)
    axes.text(40.5, places["bf16"], f"another batch: {own['another batch']:.0f}", ha="right", color="0.4", **_NUMBER)
    axes.set(xlabel="|g − r| / |r| (%)", title="(b) gradient g against FP32's r", xlim=(0, 41))
    return [
        Patch(color="0.4", linewidth=0, label="own choice of experts"),
        Line2D([], [], label="FP32's choice of experts", **_HOLLOW),
        Line2D([], [], label=f"mean of {df['num_draws'].max()} draws", **_DIAMOND),
    ]


def _draw_biases(axes: Axes, df: pd.DataFrame, places: dict[str, float]) -> list[Any]:
    axes.axvline(0, color="black", linewidth=0.5)
    whole = _of_gradient(df, BIAS, "all")
    for recipe, place in places.items():
        axes.barh(place, whole[recipe], 0.5, color=_color(recipe), linewidth=0)
    handles: list[Any] = [Patch(color="0.4", linewidth=0, label="all parameters")]
    for group, (label, marker) in _PARTS.items():
        values = _of_gradient(df, BIAS, group)
        style = _HOLLOW | {"marker": marker, "markersize": 3}
        axes.plot([values[recipe] for recipe in places], list(places.values()), **style)
        handles.append(Line2D([], [], label=label, **style))
    axes.set(xlabel="⟨g, r⟩ / |r|² − 1 (%)", title="(c) bias: g along r", xlim=(-7.5, 5.5))
    return handles


EXHIBIT = Exhibit(
    title="Ablation of the MXFP4 recipe",
    alt="A row for each of 14 recipes, by question: deviation of the loss from BF16 with both seeds and a band of "
    "noise, which only FP4 gradients leave clearly; the error of the weight gradient, largest by FLOOR; its bias.",
    hardware="one H200, three runs at a time; 248 M parameters (50 M active), 26 M tokens a run",
    note="Two seeds of 400 steps resolve a difference of 0.9 %: RCEIL and stochastic rounding (+0.7 %) are not told "
    "from noise. The gradient's error, of one set of weights, does not predict the loss: FLOOR "
    "errs the most and costs nothing that is seen, FP4 gradients add little error and cost most; why, these data do "
    "not show.",
    measured=Measured(("train", "--preset", "h200"), by_hand="28 runs on an H200, half an hour in all"),
)
