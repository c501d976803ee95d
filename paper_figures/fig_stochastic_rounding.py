"""Stochastic rounding takes the bias out of MXFP4 for 3 dB of SQNR; the saturation of FLOOR puts some back.

An element's mean error is 0 and its variance that of a choice between two neighbours, except beyond the largest value,
where nothing is left to choose. To nearest and by RCEIL, MXFP4 makes these tensors 1.1 to 3.5 % smaller, and a residual
stream, a third of which it turns to 0, 13 %; drawn, the mean is kept within its standard errors, and by FLOOR, which
saturates, it is 0.7 to 1.7 % small. The price by RCEIL is 2.7 to 3.3 dB, in FP8 too, and 5.0 dB on that residual
stream.

The dot product of numbers that lie just below a tie errs by a fifth of every product to nearest, which grows with K;
drawn, with its square root. Of positive normal numbers drawing is better from K = 512 on, though the part that FLOOR
saturates grows with K as well. Where terms cancel, rounding to nearest is better at every K, by a factor of 1.4 to 1.7.

Inputs: distributions drawn from Philox bits, and data/minilm_slices.safetensors. Any CPU, 12 s.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mxsim.analysis.accumulation import Distribution, sample
from mxsim.analysis.stochastic import (
    ROUNDINGS,
    Quantity,
    StochasticRow,
    dot_errors,
    element_errors,
    tensor_errors,
)
from mxsim.blocks import FP8_1X128, MXFP4, ScaleRule
from mxsim.plotting import FORMAT_COLORS, TEXT_WIDTH, use_theme
from paper_figures.exhibit import Exhibit
from paper_figures.files import DATA, real_tensors, write_table

TOPIC = "stochastic_rounding"
NUM_SEEDS = 8
NUM_DRAWS = 4096  # of one element
NUM_DOTS = 192
NUM_PRODUCTS = tuple(2**i for i in range(5, 13))  # K
ELEMENTS = tuple(i / 16 for i in range(8 * 16))
FORMATS = ((MXFP4, ScaleRule.FLOOR), (MXFP4, ScaleRule.RCEIL), (FP8_1X128, ScaleRule.RCEIL))

JUST_BELOW_A_TIE = "just below a tie"
TIE_VALUE = 2.484375  # a bfloat16; by any rule 4.96875 over the scale, and 5 is the tie of 4 and 6
DOT_DATA = (JUST_BELOW_A_TIE, Distribution.POSITIVE_NORMAL.value, Distribution.NORMAL.value)


def compute(folder: Path = DATA, *, num_seeds: int = NUM_SEEDS, num_draws: int = NUM_DRAWS) -> pd.DataFrame:
    """A row is a `StochasticRow`; standard_error is 0 where nothing was drawn."""
    rows = [row for rounding in ROUNDINGS for row in element_errors(ELEMENTS, num_draws=num_draws, rounding=rounding)]
    for data, x in _tensors():
        rows += _measure(data, x, num_seeds)
    for data in DOT_DATA:
        rows += dots(data)
    return write_table(pd.DataFrame([record(row) for row in rows]), TOPIC, folder)


def record(row: StochasticRow) -> dict[str, object]:
    return vars(row) | {"rounding": row.rounding.value, "quantity": row.quantity.value}


def _measure(data: str, x: np.ndarray, num_seeds: int) -> Iterator[StochasticRow]:
    for fmt, rule in FORMATS:
        yield from tensor_errors(data, x, fmt, scale_rule=rule, num_seeds=num_seeds)


def _tensors() -> Iterator[tuple[str, np.ndarray]]:
    for distribution in (Distribution.NORMAL, Distribution.STUDENT_T4):
        yield distribution.value, sample(distribution, (256, 384))
    for name, tensor in real_tensors().items():
        yield name.replace(".", " "), np.asarray(tensor, np.float32)


def dots(data: str) -> list[StochasticRow]:
    """A row of a is data, one of b of normal numbers, which are positive where those of a are."""
    shape = (NUM_DOTS, max(NUM_PRODUCTS))
    of_b = Distribution.NORMAL if data == Distribution.NORMAL.value else Distribution.POSITIVE_NORMAL
    a = np.full(shape, TIE_VALUE) if data == JUST_BELOW_A_TIE else sample(Distribution(data), shape)
    rules = (ScaleRule.RCEIL,) if data == JUST_BELOW_A_TIE else (ScaleRule.FLOOR, ScaleRule.RCEIL)
    b = sample(of_b, shape, seed=1)
    return [row for rule in rules for row in dot_errors(data, a, b, scale_rule=rule, num_products=NUM_PRODUCTS)]


STYLE = {"ties_to_even": ("to nearest", "black"), "stochastic": ("stochastic", FORMAT_COLORS["MXFP4"])}
SHORT = {"activation ": "act. ", "weight ": "wt. ", "embeddings": "emb."}


def draw(df: pd.DataFrame) -> Figure:
    use_theme()
    figure = Figure(figsize=(TEXT_WIDTH, 5.2))
    top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.3])
    bias, noise = top.subplots(1, 2)
    _draw_elements(bias, df, Quantity.ELEMENT_BIAS)
    _draw_elements(noise, df, Quantity.ELEMENT_NOISE)
    bias.set(title="(a) mean error of an element", ylabel="mean error (scale)", ylim=(-1.6, 1.1))
    noise.set(title="(b) mean squared error", ylabel="mean squared error (scale²)", ylim=(0, 1.6))
    bias.text(7, 0.25, "saturated", ha="center", color="0.4", fontsize=6.5)

    cost, *dots_axes = bottom.subplots(1, 3)
    _draw_sqnr(cost, df)
    _draw_dots(dots_axes[0], df, JUST_BELOW_A_TIE, Distribution.NORMAL.value)
    _draw_dots(dots_axes[1], df, Distribution.POSITIVE_NORMAL.value)
    dots_axes[0].set(title="(d) dot products by RCEIL", ylabel="error (RMS of a product)")
    dots_axes[1].set(title="(e) of positive normal numbers")
    for axes in dots_axes:
        axes.set(ylim=(0.4, 6000), xlabel="K (products)")
    return figure


def _chosen(df: pd.DataFrame, quantity: Quantity, **columns: str) -> pd.DataFrame:
    rows = df[df["quantity"] == quantity.value]
    for column, value in columns.items():
        rows = rows[rows[column] == value]
    return rows


def _draw_elements(axes: Axes, df: pd.DataFrame, quantity: Quantity) -> None:
    axes.axvspan(6, 8, color="0.93", zorder=0)
    axes.axhline(0, color="0.8", linewidth=0.6, zorder=0)
    nearest = _chosen(df, quantity, rounding="ties_to_even")
    drawn = _chosen(df, quantity, rounding="stochastic")
    axes.plot(nearest["at"], nearest["value"], color="black", linewidth=0.8, label="to nearest")
    axes.errorbar(
        drawn["at"],
        drawn["value"],
        yerr=2 * drawn["standard_error"],
        fmt="o",
        markersize=2,
        elinewidth=0.6,
        color=FORMAT_COLORS["MXFP4"],
        label="stochastic, ±2 standard errors",
    )
    if quantity is Quantity.ELEMENT_NOISE:
        y = np.linspace(0, 6, 601)
        gap = np.where(y < 2, 0.5, np.where(y < 4, 1, 2))
        frac = y / gap - np.floor(y / gap)
        axes.plot(y, frac * (1 - frac) * gap**2, color="0.6", linewidth=0.8, zorder=1, label="frac (1 − frac) gap²")
    axes.legend(loc="lower left" if quantity is Quantity.ELEMENT_BIAS else "upper left")
    axes.set(xlabel="element (|x| / scale)", xticks=range(9))


def _draw_sqnr(axes: Axes, df: pd.DataFrame) -> None:
    rows = _chosen(df, Quantity.SQNR_DB, scale_rule="RCEIL").pivot(
        index="data", columns=["format", "rounding"], values="value"
    )
    rows = rows.loc[list(dict.fromkeys(df.loc[df["quantity"] == Quantity.SQNR_DB.value, "data"]))]
    for y, (_, values) in enumerate(rows.iterrows()):
        for fmt in (MXFP4.name, FP8_1X128.name):
            nearest, drawn = values[fmt, "ties_to_even"], values[fmt, "stochastic"]
            color = FORMAT_COLORS[fmt]
            axes.plot([drawn, nearest], [y, y], color=color, linewidth=0.8)
            axes.plot(nearest, y, "|", color=color, markersize=6)
            axes.plot(drawn, y, "o", color=color, markersize=2.5)
            axes.text(drawn - 0.6, y, f"−{nearest - drawn:.1f}", color=color, ha="right", va="center", fontsize=5)
    names = list(rows.index)
    for long, short in SHORT.items():
        names = [name.replace(long, short) for name in names]
    axes.set_yticks(range(len(names)), names, fontsize=5.5)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="SQNR by RCEIL (dB)", title="(c) cost", xlim=(7, 36))
    axes.text(17, -1, MXFP4.name, color=FORMAT_COLORS["MXFP4"], ha="center", fontsize=6)
    axes.text(30, -1, FP8_1X128.name, color=FORMAT_COLORS["FP8_1X128"], ha="center", fontsize=6)
    axes.set_ylim(len(names) - 0.5, -1.6)


def _draw_dots(axes: Axes, df: pd.DataFrame, *data: str) -> None:
    for name, marker in zip(data, "os", strict=False):
        rows = _chosen(df, Quantity.DOT_ERROR, data=name)
        for rule, linestyle in (("RCEIL", "-"), ("FLOOR", "--")):
            if len(data) > 1 and rule == "FLOOR":
                continue
            for rounding, (label, color) in STYLE.items():
                line = rows[(rows["scale_rule"] == rule) & (rows["rounding"] == rounding)]
                words = f"{label}, {name}" if len(data) > 1 else f"{label}, {rule}"
                axes.errorbar(
                    line["at"],
                    line["value"],
                    yerr=2 * line["standard_error"],
                    color=color,
                    linestyle=linestyle,
                    marker=marker,
                    markersize=2.5,
                    linewidth=0.9,
                    label=words,
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    k = np.array([NUM_PRODUCTS[0], NUM_PRODUCTS[-1]])
    for exponent, words, at in ((1, "K", 2), (0.5, "√K", 0.55)):
        axes.plot(k, at * (k / k[0]) ** exponent, color="0.8", linewidth=0.8, zorder=0)
        axes.text(k[1] * 1.1, at * (k[1] / k[0]) ** exponent, words, color="0.5", fontsize=6.5, va="center")
    axes.set_xticks([32, 128, 512, 2048], ["32", "128", "512", "2048"])
    axes.minorticks_off()
    axes.legend(loc="upper left")


EXHIBIT = Exhibit(
    title="Stochastic rounding",
    alt="Rounding to nearest beside stochastic rounding: mean error and mean squared error of an element, SQNR lost "
    "by each tensor, and error of dot products by K.",
    hardware="any CPU",
    note="Forward quantization of one small transformer. What stochastic activations and gradients do to "
    "training is the exhibit Ablation of the MXFP4 recipe.",
)
