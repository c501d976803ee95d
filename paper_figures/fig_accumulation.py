"""Hopper's 13 fraction bits cost a dot product 0.005 to 0.06 %, as the sum is promoted to FP32 every 128 products.

Unpromoted the error grows with K. At K = 7168 it is 0.2 % where terms cancel, which quantizing to FP8 (1 to 4 %) hides,
but 11 % where all are positive, which FP8 operands leave within 0.2 % and MXFP4 operands within 4 %; there promotion
brings it to 0.06 %. Another fraction bit divides the promoted error by 2 to 3. Of MXFP4 operands, converted to FP8,
the promoted sum is exact on all of these data.

A public model predicts mean errors of -6.8 % unpromoted and -0.021 % promoted for positive data at K = 4096. Here they
are -6.6 to -7.0 % of normal and uniform data and -1.9 % of log-uniform data; promoted, -0.003 to -0.086 %, as the
products have few low bits or many.

Inputs: distributions drawn from Philox bits, and data/minilm_slices.safetensors. Any CPU, 20 s.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from mxsim.analysis.accumulation import (
    PROMOTION_INTERVALS,
    ROW_SCALE,
    AccumulationRow,
    Case,
    Distribution,
    compare_with_quantization,
    concatenate_rows,
    default_cases,
    sample,
    sweep,
)
from mxsim.blocks.gemm import HOPPER
from mxsim.plotting import FORMAT_COLORS, TEXT_WIDTH, use_theme
from paper_figures.exhibit import Exhibit
from paper_figures.files import DATA, real_tensors, write_table

TOPIC = "accumulation"
SIZE = 32  # SIZE * SIZE dot products of each kind
HIDDEN = 7168  # K: hidden size of DeepSeek-V3
LONG = 18432  # K: its dense feed-forward size
CASES = [*default_cases(k=HIDDEN), Case(LONG), Case(LONG, promotion_interval=None)]

# Activations by the weights that they meet in the model, both with their first 256 channels.
MINILM = {
    f"MiniLM layer {layer}": (f"activation.layer{layer}.ffn_input", f"weight.layer{layer}.ffn_up") for layer in (0, 5)
}
DATA_SETS = (
    Distribution.NORMAL.value,
    Distribution.POSITIVE_NORMAL.value,
    Distribution.STUDENT_T4.value,
    *MINILM,
)

# The published prediction: all-positive data of an unnamed distribution, K = 4096.
PUBLISHED_K = 4096
PUBLISHED_MEAN_ERROR = {"never": -0.068, "128": -0.00021}
PUBLISHED_FIGURE = Distribution.POSITIVE_NORMAL.value
PUBLISHED_CASES = [Case(PUBLISHED_K), Case(PUBLISHED_K, promotion_interval=None)]
# Beside positive normal data.
PUBLISHED_DATA = (Distribution.UNIFORM.value, Distribution.UNIFORM_1_2.value, Distribution.LOG_UNIFORM.value)


def compute(folder: Path = DATA, *, size: int = SIZE) -> pd.DataFrame:
    """Errors over size * size dot products; a row is an `AccumulationRow`, the errors as fractions, not in percent.

    fraction_bits is exact where nothing was rounded, promotion_interval never where nothing was promoted.
    """
    rows = [row for data in DATA_SETS for row in measure(data, CASES, size=size, beside_quantization=True)]
    rows += [row for data in PUBLISHED_DATA for row in measure(data, PUBLISHED_CASES, size=size)]
    return write_table(pd.DataFrame([record(row) for row in dict.fromkeys(rows)]), TOPIC, folder)


def record(row: AccumulationRow) -> dict[str, object]:
    return vars(row) | {
        "error_of": row.error_of.value,
        "fraction_bits": "exact" if row.fraction_bits is None else str(row.fraction_bits),
        "promotion_interval": _interval_name(row.promotion_interval),
    }


def measure(
    data: str, cases: Sequence[Case], *, size: int = SIZE, beside_quantization: bool = False
) -> Iterator[AccumulationRow]:
    a, b = operands(data, (size, max(LONG, *(case.k for case in cases))))
    yield from sweep(data, a, b, cases)
    if beside_quantization:
        accumulators = (HOPPER, replace(HOPPER, name="never promoted", promotion_interval=None))
        yield from compare_with_quantization(data, a[:, :HIDDEN], b[:, :HIDDEN], accumulators=accumulators)


def operands(data: str, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Sources of a and b, both of that shape."""
    if data not in MINILM:
        a, b = (sample(Distribution(data), shape, seed=seed) for seed in (0, 1))
        return a, b
    tensors = real_tensors()
    activation, weight = (tensors[name] for name in MINILM[data])
    channels = weight.shape[1]
    return concatenate_rows(activation[:, :channels], shape, seed=0), concatenate_rows(weight, shape, seed=1)


def _interval_name(interval: int | None) -> str:
    return "never" if interval is None else str(interval)


INTERVAL_NAMES = [_interval_name(interval) for interval in PROMOTION_INTERVALS]


def draw(df: pd.DataFrame) -> Figure:
    use_theme()
    df = df.assign(percent=100 * df["relative_frobenius_error"])
    figure = Figure(figsize=(TEXT_WIDTH, 4.2))
    panels = figure.subplots(2, len(DATA_SETS), sharey="row", sharex="row")
    for column, data in enumerate(DATA_SETS):
        rows = df[df["data"] == data]
        swept = rows[(rows["error_of"] == "accumulation") & (rows["operands"] == ROW_SCALE)]
        by_bits, by_k = panels[:, column]
        _draw_lines(by_bits, swept[swept["k"] == HIDDEN], "fraction_bits", ("128", "never"))
        _draw_lines(by_k, swept[swept["fraction_bits"] == "13"], "k", INTERVAL_NAMES)
        for axes in (by_bits, by_k):
            _draw_quantization(axes, rows, label=column == 0)
        by_bits.axvline(13, color="0.8", linewidth=0.8, zorder=0)
        by_bits.set(title=data, xlabel="fraction bits (bits)", xticks=[8, 13, 18, 23])
        by_k.set(xlabel="K (products)")
        if data == PUBLISHED_FIGURE:
            _draw_published(by_k)
    bits, products = panels[:, 0]
    for axes, lowest in ((bits, -5), (products, -3)):
        axes.set_yscale("log")
        axes.set(ylabel="error of the dot product (%)", ylim=(10**lowest * 0.6, 100))
        exponents = range(lowest, 3)
        axes.set_yticks(
            [10.0**e for e in exponents], [f"{10.0**e:g}" if e > -4 else f"$10^{{{e}}}$" for e in exponents]
        )
    products.set_xscale("log", base=2)
    products.set_xticks([128, 1024, HIDDEN], ["128", "1024", "7168"])
    for axes in panels.flat:
        axes.minorticks_off()
    panels[0, 1].text(12.7, 1e-5, "Hopper", color="0.5", ha="right", va="center", fontsize=6)
    bits.text(0.97, 0.68, f"K = {HIDDEN}", transform=bits.transAxes, ha="right", fontsize=6.5)
    products.text(0.97, 0.62, "13 fraction bits", transform=products.transAxes, ha="right", fontsize=6.5)
    handles, labels = panels[1, DATA_SETS.index(PUBLISHED_FIGURE)].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels),
        title="promotion to FP32 every ... products",
    )
    return figure


def _draw_lines(axes: Axes, rows: pd.DataFrame, x: str, intervals: Sequence[str]) -> None:
    shades = LinearSegmentedColormap.from_list("intervals", ["#C9C2E8", FORMAT_COLORS["FP8_1X128"], "black"])
    for number, name in enumerate(INTERVAL_NAMES):
        line = rows[rows["promotion_interval"] == name].astype({x: int}).sort_values(x)
        if name in intervals:
            axes.plot(
                line[x],
                line["percent"],
                color=shades(number / (len(INTERVAL_NAMES) - 1)),
                label=name,
                linewidth=1.6 if name == "128" else 1,
                linestyle="--" if name == "never" else "-",
            )


def _draw_published(axes: Axes) -> None:
    percent = [-100 * error for error in PUBLISHED_MEAN_ERROR.values()]
    style = {"color": "black", "markersize": 5, "markeredgewidth": 0.8, "zorder": 3}
    axes.plot([PUBLISHED_K] * len(percent), percent, "x", label="public model: 128, never", **style)


def _draw_quantization(axes: Axes, rows: pd.DataFrame, *, label: bool) -> None:
    quantized = rows[rows["error_of"] == "quantization"].set_index("operands")["percent"]
    for name in ("MXFP4", "FP8_1X128"):
        axes.axhline(quantized[name], color=FORMAT_COLORS[name], linewidth=0.8, linestyle=":")
        if label:
            axes.text(
                0.98,
                quantized[name] * 1.15,
                f"{name} operands",
                color=FORMAT_COLORS[name],
                ha="right",
                fontsize=6,
                transform=axes.get_yaxis_transform(),
            )


EXHIBIT = Exhibit(
    title="Hopper's accumulator",
    alt="Ten panels, five kinds of data: error of a dot product by fraction bits, and by K, a line for each promotion "
    "interval, with what quantizing the operands costs as dotted lines.",
    hardware="emulated on a CPU; the emulation is compared bit by bit with an H200",
    note="Dot products of two layers of one small model and three distributions; larger models may have other data.",
)
