"""One model of 248 M parameters trained on 100 M bytes in BF16, FP8 and MXFP4 experts, three seeds each.

Mean validation loss over the last 5 % of the steps against BF16 of the same seed, mean of three seeds: FP8 -0.07 %
(-0.53 to +0.37), MXFP4 +0.34 % (-0.01 to +0.65); the paper, at 16 B parameters and 160 B tokens: +0.29 % and +0.61 %.
The yardstick is the band: the largest difference between two of BF16's three seeds, 0.48 %, drawn to both sides of 0.
Both means are inside it, and each is less than two standard errors (0.26 %, 0.19 %) from 0, where with three seeds a
95 % interval is 4.3 to either side. So neither recipe can be told from BF16, nor from the paper's deviation: with seeds
that scatter by 0.39 % (standard deviation) it takes seven for two standard errors to be 0.3 %.

A seed decides the initial weights and the order of the text; FP8 and MXFP4 share both with the BF16 that they are
compared with, the seeds of BF16 neither. That helps little: by the end they are as far from it as its seeds are from
each other. Validation text is the same for all. A training loss is the mean over the steps since the row of the log
before. The experts are in the recipe, routed and shared; attention, head and embedding are BF16 in every run.

Below, what MXFP4 does to the activations it stores, in training, by layer, seed 0: where its error enters.

Inputs: benchmarks/results/train_h200, logs of mxsim train on an H200; any CPU, a second. With --recompute tiny the same
figure of the preset tiny, trained on the CPU: python -m paper_figures.fig5_loss_curves --recompute tiny
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mxsim.plotting import FORMAT_COLORS, TEXT_WIDTH, use_theme
from paper_figures.exhibit import Exhibit, Measured, Row, compared
from paper_figures.files import DATA, RESULTS, save_figure, write_table

TOPIC = "loss_curves"
MEASURED = RESULTS / "train_h200"
RECOMPUTED = Path("build") / "loss_curves_tiny"
SEEDS = (0, 1, 2)
RECOMPUTED_SEEDS = (0, 1)
RUNS = tuple((recipe, seed) for recipe in ("bf16", "fp8", "mxfp4") for seed in SEEDS)
PAPER = {"fp8": 0.29, "mxfp4": 0.61}  # percent
FINAL_SHARE = 20  # the last 5 %
DIAGNOSTICS = ("sqnr_db", "mean_spread", "max_spread", "inexact_rows", "inexact_columns")
COLUMNS = ("recipe", "seed", "step", "tokens", "quantity", "layer", "activation", "value", "device", "torch")

_STYLES = ("-", ":", "--")  # by seed
_LABELS = {"bf16": "BF16", "fp8": "FP8", "mxfp4": "MXFP4"}
_COLORS = dict(zip(_LABELS, (FORMAT_COLORS[f] for f in ("BF16", "FP8_1X128", "MXFP4")), strict=True))
_ACTIVATIONS = {
    "expert_input": ("expert input", "#AA4499"),
    "swiglu_input": ("SwiGLU input", "#B8860B"),
    "down_input": ("second GEMM's input", "#44AA99"),
}
_WINDOW = 14  # octaves: FP4 -> FP8 with headroom 6 is exact up to here


@dataclass(frozen=True)
class Run:
    recipe: str
    seed: int
    num_steps: int
    log: pd.DataFrame  # a row for each row of log.csv, by step, with train_loss smoothed beside
    diagnostics: pd.DataFrame
    device: str
    torch: str

    @property
    def num_final_steps(self) -> int:
        return max(1, self.num_steps // FINAL_SHARE)

    def curves(self) -> dict[str, pd.Series]:
        """Losses by step, the last value of each mean being over the last 5 % of the steps."""
        validation = self.log["validation_loss"].dropna()
        is_final = validation.index > self.num_steps - self.num_final_steps
        return {
            "training": self.log["smoothed"].dropna(),
            "validation": validation,
            "final training": self.log["smoothed"].iloc[-1:],
            "final validation": pd.Series({self.num_steps: validation[is_final].mean()}),
        }


def compute(folder: Path = DATA, *, measured: Path = MEASURED) -> pd.DataFrame:
    """A row for each loss (nats a byte), deviation (%), speed (tokens a second) and diagnosis of a stored activation.

    measured: holds a folder for each run, as `mxsim train` writes it.

    Raises:
        ValueError: if no activation was diagnosed, or runs were logged at other steps than BF16's.
    """
    found = {
        (run.recipe, run.seed): run
        for run in map(read_run, sorted(path.parent for path in measured.glob("*/run.json")))
    }
    table = pd.DataFrame([row for run in found.values() for row in _rows(run, found)], columns=COLUMNS)
    if not (table["quantity"] == "sqnr_db").any():
        raise ValueError(f"compute: no run in {measured} holds diagnostics of stored activations, needed MXFP4's")
    return write_table(table, TOPIC, folder)


def read_run(folder: Path) -> Run:
    document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    config, made = document["config"], document["provenance"]
    log = pd.read_csv(folder / "log.csv").set_index("step")
    log["smoothed"] = _smoothed(log["train_loss"], max(1, config["steps"] // FINAL_SHARE))
    return Run(
        recipe=config["recipe"],
        seed=config["seed"],
        num_steps=config["steps"],
        log=log,
        diagnostics=pd.read_csv(folder / "diagnostics.csv"),
        device=made["device"],
        torch=made["torch"],
    )


def _smoothed(train_loss: pd.Series, num_steps: int) -> pd.Series:
    """The mean over the fewest whole rows that end at a step and hold num_steps steps; NaN before there are as many."""
    ends = [0, *train_loss.index]
    sums = [0.0]
    for before, step in itertools.pairwise(ends):
        sums.append(sums[-1] + (step - before) * train_loss[step])
    smoothed = {}
    for number, end in enumerate(ends[1:], 1):
        first = max((n for n in range(number) if end - ends[n] >= num_steps), default=None)
        smoothed[end] = float("nan") if first is None else (sums[number] - sums[first]) / (end - ends[first])
    return pd.Series(smoothed)


def _rows(run: Run, runs: dict[tuple[str, int], Run]) -> Iterator[tuple[Any, ...]]:
    """BF16 is compared with its seed 0, another recipe with BF16 of its seed."""
    tokens = run.log["tokens"]

    def row(step: int, quantity: str, value: float, layer: str = "all", activation: str = "none") -> tuple[Any, ...]:
        return run.recipe, run.seed, step, tokens[step], quantity, layer, activation, value, run.device, run.torch

    for step, loss in run.log["train_loss"].items():
        yield row(step, "training loss, as logged", loss)
    base = runs["bf16", 0 if run.recipe == "bf16" else run.seed].curves()
    for name, losses in run.curves().items():
        if list(losses.index) != list(base[name].index):
            raise ValueError(
                f"compute: the {name} losses of {run.recipe}, seed {run.seed}, are of other steps than BF16's"
            )
        for step, loss in losses.items():
            yield row(step, f"{name} loss", loss)
            if run is not runs["bf16", 0]:
                yield row(step, f"{name} deviation", 100 * (loss / base[name][step] - 1))
    yield row(run.num_steps, "median tokens a second", run.log["tokens_per_s"].sort_values().iloc[len(run.log) // 2])
    stored = run.diagnostics[run.diagnostics["is_stored"]]
    for diagnosis in stored.itertuples():
        for quantity in DIAGNOSTICS:
            value = getattr(diagnosis, quantity)
            if value == value:  # NaN: nothing reads SwiGLU's input as FP8
                yield row(diagnosis.step, quantity, value, str(diagnosis.layer), diagnosis.activation)


def draw(df: pd.DataFrame) -> Figure:
    use_theme()
    figure = Figure(figsize=(TEXT_WIDTH, 4.4))
    (losses, deviations, final), (sqnr, spread, inexact) = figure.subplots(2, 3)
    runs = [(recipe, seed, rows) for (recipe, seed), rows in df.groupby(["recipe", "seed"])]
    _draw_losses(losses, runs)
    _draw_deviations(deviations, df, runs)
    _draw_final(final, df, runs)
    _draw_diagnostics(sqnr, spread, inexact, df[(df["recipe"] == "mxfp4") & (df["seed"] == 0)])
    return figure


Runs = list[tuple[str, int, pd.DataFrame]]


def _curve(rows: pd.DataFrame, quantity: str) -> pd.Series:
    """By million tokens."""
    found = rows[rows["quantity"] == quantity]
    return pd.Series(found["value"].to_numpy(), found["tokens"].to_numpy() / 1e6)


def _draw_losses(axes: Axes, runs: Runs) -> None:
    for recipe, seed, rows in runs:
        style = _STYLES[seed % len(_STYLES)]
        axes.plot(_curve(rows, "training loss, as logged"), color=_COLORS[recipe], linewidth=0.4, alpha=0.4)
        axes.plot(_curve(rows, "validation loss"), style, color=_COLORS[recipe], linewidth=0.8)
    end = min(_curve(rows, "training loss, as logged").min() for _, _, rows in runs)
    start = max(_curve(rows, "validation loss").max() for _, _, rows in runs)
    axes.set(ylim=(end - 0.03, start + 0.1), xlabel="trained on (million tokens)", ylabel="loss (nats a byte)")
    axes.set_title("a  loss")
    grey = {"color": "0.4"}
    handles = [Line2D([], [], color=_COLORS[recipe], label=_LABELS[recipe]) for recipe in _LABELS]
    handles += [
        Line2D([], [], **grey, linestyle=_STYLES[seed % len(_STYLES)], linewidth=0.8, label=f"seed {seed}, validation")
        for seed in sorted({seed for _, seed, _ in runs})
    ]
    handles.append(Line2D([], [], **grey, linewidth=0.4, label="training, as logged"))
    axes.legend(handles=handles, loc="upper right")


def _draw_deviations(axes: Axes, df: pd.DataFrame, runs: Runs) -> None:
    band = _spread(df, "validation deviation")
    axes.fill_between(band.index, -band, band, color=_COLORS["bf16"], alpha=0.25, linewidth=0)
    for recipe, percent in PAPER.items():
        color = _COLORS[recipe]
        curves = [_curve(rows, "validation deviation") for found, _, rows in runs if found == recipe]
        for curve in curves:
            axes.plot(curve, color=color, linewidth=0.5, alpha=0.7)
        axes.plot(pd.concat(curves, axis=1).mean(axis=1), color=color, linewidth=1.6)
        axes.axhline(percent, color=color, linestyle="--", linewidth=0.8)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(ylim=(-2.4, 1.4), xlabel="trained on (million tokens)", ylabel="deviation from BF16 (%)")
    axes.set_title("b  validation, against BF16")
    grey = {"color": "0.4"}
    handles = [
        Patch(color=_COLORS["bf16"], alpha=0.25, linewidth=0, label="between BF16's seeds"),
        Line2D([], [], **grey, linewidth=1.6, label="mean of the seeds"),
        Line2D([], [], **grey, linewidth=0.5, label="a seed"),
        Line2D([], [], **grey, linewidth=0.8, linestyle="--", label="the paper's end"),
    ]
    axes.legend(handles=handles, loc="lower right", ncols=1)


def _draw_final(axes: Axes, df: pd.DataFrame, runs: Runs) -> None:
    spread = _spread(df, "final validation deviation").iloc[-1]
    axes.axhspan(-spread, spread, color=_COLORS["bf16"], alpha=0.25, linewidth=0)
    axes.axhline(0, color="black", linewidth=0.5)
    final = final_deviations(df)
    for place, recipe in enumerate(_LABELS):
        color = _COLORS[recipe]
        for seed, deviation in final[recipe].items():
            axes.plot(place + 0.15, deviation, "o", color=color, markersize=3)
            axes.text(place + 0.22, deviation, str(seed), va="center", fontsize=6)
        if recipe in PAPER:
            mean, percent = final[recipe].mean(), PAPER[recipe]
            axes.plot([place - 0.3, place + 0.05], [mean, mean], color=color, linewidth=2)
            below = mean < 0
            where = {"ha": "center", "va": "top" if below else "bottom", "fontsize": 6}
            axes.text(place - 0.13, mean + (-0.03 if below else 0.02), f"{mean:+.2f}", **where)
            axes.plot([place - 0.4, place + 0.4], [percent, percent], "--", color=color, linewidth=0.8)
    axes.set_xticks(range(len(_LABELS)), _LABELS.values())
    axes.set(xlim=(-0.5, len(_LABELS) - 0.5), ylabel="deviation from BF16 (%)")
    axes.set_title("c  validation, last 5 % of the steps")
    axes.set_ylim(min(-0.7, axes.dataLim.ymin - 0.1), max(1.1, axes.dataLim.ymax + 0.4))
    handles = [
        Line2D([], [], color="0.4", linewidth=2, label="mean of the seeds"),
        Line2D([], [], color="0.4", linestyle="", marker="o", markersize=3, label="a seed"),
        Line2D([], [], color="0.4", linewidth=0.8, linestyle="--", label="the paper"),
    ]
    axes.legend(handles=handles, loc="upper left")


def final_deviations(df: pd.DataFrame) -> dict[str, pd.Series]:
    """Percent by seed, for each recipe: the mean over the last 5 % of the steps against BF16's; BF16 against seed 0."""
    found = df[df["quantity"] == "final validation deviation"]
    return {recipe: rows.set_index("seed")["value"] for recipe, rows in found.groupby("recipe")}


def _draw_diagnostics(sqnr: Axes, spread: Axes, inexact: Axes, df: pd.DataFrame) -> None:
    last_layer = df.loc[df["layer"] != "all", "layer"].astype(int).max()
    for activation, (label, color) in _ACTIVATIONS.items():
        rows = df[df["activation"] == activation]
        for layer, of_layer in rows[rows["quantity"] == "sqnr_db"].groupby("layer"):
            shade = _lighter(color, 0.6 * int(layer) / max(1, last_layer))
            sqnr.plot(_curve(of_layer, "sqnr_db"), color=shade, linewidth=0.9)
        sqnr.plot([], [], color=color, label=label)
        for axes, quantity, style, scale in (
            (spread, "max_spread", "-", 1),
            (spread, "mean_spread", ":", 1),
            (inexact, "inexact_rows", "-", 100),
            (inexact, "inexact_columns", "--", 100),
        ):
            found = rows[rows["quantity"] == quantity]
            if len(found):
                by_tokens = found.groupby("tokens")["value"]
                values = scale * (by_tokens.mean() if quantity == "mean_spread" else by_tokens.max())
                axes.plot(values.index / 1e6, values, style, color=color, linewidth=0.9)
    xlabel = "trained on (million tokens)"
    sqnr.set(xlabel=xlabel, ylabel="SQNR in MXFP4 (dB)")
    sqnr.set_title("d  stored activations, a line a layer")
    sqnr.set_ylim(sqnr.dataLim.ymin - 2.8, None)
    sqnr.legend(loc="lower right", ncols=1, title="dark: first layer, light: last")
    spread.axhline(_WINDOW, color="black", linewidth=0.6)
    spread.text(
        0.98, (_WINDOW + 0.2) / 17, "headroom 6 is exact up to here", ha="right", fontsize=6, transform=spread.transAxes
    )
    spread.set(ylim=(0, 17), xlabel=xlabel, ylabel="spread of four scales (octaves)")
    spread.set_title("e  scales along the rows")
    inexact.set(xlabel=xlabel, ylabel="inexact FP8 blocks (%)")
    inexact.set_title("f  FP4 -> FP8, the worst layer")
    inexact.set_ylim(-0.02 * max(inexact.dataLim.ymax, 0.05), 1.5 * max(inexact.dataLim.ymax, 0.05))
    for axes, of in (
        (spread, (("-", "largest, any layer"), (":", "mean, all layers"))),
        (inexact, (("-", "rows"), ("--", "columns"))),
    ):
        handles = [Line2D([], [], color="0.4", linestyle=style, label=name) for style, name in of]
        axes.legend(handles=handles, loc="center right" if axes is spread else "upper left")


def _spread(df: pd.DataFrame, quantity: str) -> pd.Series:
    """The largest difference between two seeds of BF16, in percent of seed 0's loss, by million tokens."""
    rows = df[(df["recipe"] == "bf16") & (df["quantity"] == quantity)]
    by_tokens = rows["value"].groupby(rows["tokens"])
    widest = by_tokens.max().clip(lower=0) - by_tokens.min().clip(upper=0)  # seed 0 is at 0
    return widest.set_axis(widest.index / 1e6)


def _label(recipe: str, seed: int) -> str:
    return f"{_LABELS[recipe]}, seed {seed}"


def _lighter(color: str, share: float) -> tuple[float, float, float]:
    red, green, blue = (x + (1 - x) * share for x in to_rgb(color))
    return red, green, blue


def _rows_of_page(df: pd.DataFrame) -> list[Row]:
    rows = []
    for recipe, of_seeds in final_deviations(df).items():
        each = ", ".join(f"{value:+.2f}" for value in of_seeds)
        if recipe in PAPER:
            what = f"validation loss of {_LABELS[recipe]} against BF16, mean of {len(of_seeds)} seeds ({each})"
            rows.append(compared(what, of_seeds.mean(), PAPER[recipe], unit=" %"))
        else:
            spread = _spread(df, "final validation deviation").iloc[-1]
            rows.append(Row("largest difference between two of BF16's seeds", "not given", f"{spread:.2f} %", ""))
    return rows


EXHIBIT = Exhibit(
    title="Figure 5: loss curves",
    alt="Losses of BF16, FP8 and MXFP4 lie on each other; the deviations of single seeds end between -0.5 and +0.7 %, "
    "their means inside the spread of BF16's seeds; the error, the spread of scales and the share of inexact blocks of "
    "what MXFP4 stores, by layer.",
    claim="The loss deviates from BF16's by 0.29 % in FP8 and by 0.61 % in MXFP4.",
    paper_hardware="16 B parameters, 160 B tokens",
    hardware="one H200 a run, 248 M parameters (50 M active), 0.1 B tokens",
    rows=_rows_of_page,
    note="Ours is a model a sixty-fifth as large on a sixteen-hundredth of the tokens, and only its experts are in the "
    "recipe. Three seeds of a recipe scatter by up to 0.9 %, those of BF16 by 0.5 %: neither recipe can be told from "
    "BF16, nor from the paper's deviation.",
    measured=Measured(("train", "--preset", "h200"), by_hand="nine runs of three to four minutes on an H200"),
)


def recompute(preset: str, folder: Path, *, fields: tuple[str, ...] = ()) -> pd.DataFrame:
    """Train RUNS of RECOMPUTED_SEEDS on the CPU into folder/runs, or go on where that was interrupted; then `compute`.

    fields: name=value, of mxsim.train.config.TrainConfig.

    Raises:
        KeyboardInterrupt: after Ctrl-C; the next call goes on from there.
    """
    from dataclasses import replace

    from rich.console import Console

    from mxsim.commands.progress import progress_bar
    from mxsim.train.config import PRESETS
    from mxsim.train.corpus import load_corpus
    from mxsim.train.loop import train

    console = Console(stderr=True)
    for recipe, seed in RUNS:
        if seed not in RECOMPUTED_SEEDS:
            continue
        console.print(f"{_label(recipe, seed)} ...", markup=False)
        config = replace(PRESETS[preset].with_fields(fields), recipe=recipe, seed=seed)
        path = folder / "runs" / f"{recipe}-seed{seed}"
        with progress_bar(console) as update:
            document = train(config, load_corpus(None), path, device="cpu", resume=True, progress=update)
        if document["status"] == "interrupted":
            raise KeyboardInterrupt
    return compute(folder, measured=folder / "runs")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m paper_figures.fig5_loss_curves", description="Draw the loss curves."
    )
    parser.add_argument("--recompute", choices=["tiny"], help="train this preset on the CPU first (minutes)")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the preset")
    parser.add_argument(
        "--out", type=Path, default=RECOMPUTED, help=f"where --recompute writes (default: {RECOMPUTED})"
    )
    options = parser.parse_args()
    if options.recompute is None:
        if options.set:
            parser.error("--set needs --recompute")
        pictures = save_figure(draw(compute()), TOPIC)
    else:
        try:
            table = recompute(options.recompute, options.out, fields=tuple(options.set))
        except KeyboardInterrupt:
            parser.exit(130, "\ninterrupted; the same command goes on\n")
        except ValueError as error:  # ConfigError, RunError
            parser.error(str(error))
        pictures = save_figure(draw(table), TOPIC, options.out)
    print(*pictures, sep="\n")


if __name__ == "__main__":
    main()
