"""A fifth to three quarters of MXFP4's error is its power-of-two scale; conversions to FP8 add nothing to it.

With an ideal scale a block of 32 loses 0.4 to 1.4 % of the signal's energy. The power of two adds 0.3 to 1.5 %: 20 to
30 % of the whole in weights, 38 to 72 % in activations, with FLOOR partly as clipping, with EVEN as a coarser grid.

FP8 at headroom 6 keeps every FP4 value, in rows and columns, and so does the way through BF16; headroom 0 loses 19
elements of one tensor. The published transpose of such rows adds up to 16 % of the whole error. FP8 rows become columns
for less than a millionth of the error with rounding, for up to 18 millionths by the published transpose. Hopper's
accumulator adds at most 0.01 % to the squared error of a GEMM of 256 products.

Inputs: data/minilm_slices.safetensors. Any CPU, half a minute.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mxsim.analysis import CHAINS, Chain, Decomposition, Part, decompose, decompose_gemm
from mxsim.blocks import FP8_128X128, MXFP4, ScaleRule
from mxsim.plotting import TEXT_WIDTH, use_theme
from paper_figures.exhibit import Exhibit
from paper_figures.files import DATA, real_tensors, write_table

TOPIC = "error_decomposition"
ROWS = 64  # of activations and of weights in a GEMM
GEMMS = {
    f"layer{layer} ffn_up": (f"activation.layer{layer}.ffn_input", f"weight.layer{layer}.ffn_up") for layer in (0, 5)
}
GEMM_OPERANDS = ("FP4 -> FP8 row, headroom 6", "FP8 row")  # of the activation; the weight is FP8 128 x 128
_SIGNIFICANT_DIGITS = 6


def compute(folder: Path = DATA) -> pd.DataFrame:
    """Each part of the squared error of each tensor under each chain, and of two layers' GEMMs.

    num_changed: elements that the part changes. relative_squared_error: what it adds to sum (result - x)**2, over
    sum x**2. share: of the whole squared error. FP4 by every scale rule, the chains after it by FLOOR.
    """
    rows = [row for name, x in real_tensors().items() for row in measure(name, x)]
    return write_table(pd.DataFrame([*rows, *measure_gemms()]), TOPIC, folder)


def measure(name: str, x: np.ndarray) -> Iterator[dict[str, object]]:
    kind, _, rest = name.partition(".")
    data = rest.replace(".", " ")
    by_rule = [Chain("FP4", MXFP4, scale_rule=rule) for rule in ScaleRule]
    for chain in (*by_rule, *(chain for chain in CHAINS.values() if chain.name != "FP4")):
        yield from _records(kind, data, chain, decompose(x, chain))


def measure_gemms() -> Iterator[dict[str, object]]:
    tensors = real_tensors()
    for data, (activation, weight) in GEMMS.items():
        channels = tensors[weight].shape[1]
        b = decompose(tensors[weight][:ROWS], Chain("weight", FP8_128X128))
        for name in GEMM_OPERANDS:
            a = decompose(tensors[activation][:ROWS, :channels], CHAINS[name])
            yield from _records("GEMM", data, CHAINS[name], decompose_gemm(a, b))


def _records(kind: str, data: str, chain: Chain, d: Decomposition) -> Iterator[dict[str, object]]:
    rule = chain.scale_rule or chain.fmt.default_scale_rule
    assert rule is not None
    for row in d.table().to_dict("records"):
        yield {
            "kind": kind,
            "data": data,
            "chain": chain.name,
            "scale_rule": rule.name,
            "part": row["part"],
            "num_elements": d.x.size,
            "num_changed": row["num_elements"],
            "relative_squared_error": _rounded(row["relative_squared_error"]),
            "share": _rounded(row["share"]),
        }


def _rounded(x: float) -> float:
    return float(f"{x:.{_SIGNIFICANT_DIGITS}g}")


# Quantizing: the parts of panel (a), in the order of the states.
COLORS = {
    Part.UNDERFLOW.value: "#999999",
    Part.GRID.value: "#0072B2",
    Part.SCALE_RULE.value: "#E69F00",
    Part.CLIPPING.value: "#D55E00",
}
RULES = ("FLOOR", "EVEN")
# Panel (b), a dot a tensor or a GEMM: chain and part -> label.
STEPS = {
    ("FP4 -> FP8 row, headroom 6", "second rounding"): "FP4 to FP8 row, headroom 6",
    ("FP4 -> FP8 row, headroom 0", "second rounding"): "FP4 to FP8 row, headroom 0",
    ("FP4 -> FP8 column, headroom 6", "second rounding"): "FP4 to FP8 column, headroom 6",
    ("FP4 -> FP8 column, headroom 0", "second rounding"): "FP4 to FP8 column, headroom 0",
    ("FP4 -> BF16 -> FP8 column", "second rounding"): "FP4 to FP8 column through BF16",
    ("FP4 -> FP8 row, headroom 0 -> published column", "transpose"): "published transpose of FP4's FP8 row",
    ("FP8 row -> FP8 column", "transpose"): "FP8 row to column, rounded",
    ("FP8 row -> BF16 -> FP8 column", "transpose"): "FP8 row to column through BF16",
    ("FP8 row -> published column", "transpose"): "FP8 row to column, published",
    ("FP4 -> FP8 row, headroom 6", "accumulation"): "Hopper's accumulator, FP4 by FP8",
    ("FP8 row", "accumulation"): "Hopper's accumulator, FP8 by FP8",
}
_NOTHING = 1e-12  # where zeros are drawn


def draw(df: pd.DataFrame) -> Figure:
    use_theme()
    figure = Figure(figsize=(TEXT_WIDTH, 3.8))
    tensors, steps = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.15, 1]})
    _draw_tensors(tensors, df[(df["chain"] == "FP4") & df["scale_rule"].isin(RULES)])
    _draw_steps(steps, df)
    figure.legend(*tensors.get_legend_handles_labels(), loc="outside lower left", ncols=len(COLORS))
    return figure


def _draw_tensors(axes: Axes, df: pd.DataFrame) -> None:
    data = df[["kind", "data"]].drop_duplicates()
    y = np.arange(len(data)) + 0.6 * (data["kind"] == "weight").to_numpy()
    for number, rule in enumerate(RULES):
        place, left = y + 0.38 * (number - 0.5), np.zeros(len(data))
        for part, color in COLORS.items():
            rows = df[(df["scale_rule"] == rule) & (df["part"] == part)]
            width = 100 * rows["relative_squared_error"].to_numpy()
            axes.barh(place, width, 0.34, left, color=color, label=part if number == 0 else None)
            left += width
        axes.text(left[0] + 0.03, place[0], rule, va="center", fontsize=5.5)
    axes.set_yticks(y, data["data"] + data["kind"].map({"activation": "", "weight": " weight"}))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="squared error over squared signal (%)", title="(a) MXFP4: FLOOR above, EVEN below")


def _draw_steps(axes: Axes, df: pd.DataFrame) -> None:
    for number, (chain, part) in enumerate(STEPS):
        in_gemm = part == Part.ACCUMULATION.value
        rows = df[(df["chain"] == chain) & (df["part"] == part) & ((df["kind"] == "GEMM") == in_gemm)]
        share = rows["share"].abs().to_numpy()
        zero = share == 0
        color = "#009E73" if in_gemm else "#332288"
        axes.plot(share[~zero], np.full((~zero).sum(), number), "o", markersize=3, color=color, alpha=0.7)
        if zero.any():
            axes.plot(_NOTHING, number, "o", markersize=3, markerfacecolor="none", color=color)
            count = f"{zero.sum()} of {zero.size}"
            axes.annotate(count, (_NOTHING, number), (4, 1), textcoords="offset points", fontsize=5.5, color=color)
    axes.set_xscale("log")
    ticks = [1e-9, 1e-6, 1e-3, 1]
    axes.set_xticks([_NOTHING, *ticks], ["none", *(f"$10^{{{round(np.log10(t))}}}$" for t in ticks[:-1]), "1"])
    axes.minorticks_off()
    axes.set_xlim(_NOTHING / 3, 2)
    axes.set_yticks(range(len(STEPS)), list(STEPS.values()))
    axes.invert_yaxis()
    axes.grid(axis="y", linewidth=0.3, color="0.85")
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="share of the error (fraction)", title="(b) added by later steps")


EXHIBIT = Exhibit(
    title="Where MXFP4's error comes from",
    alt="Stacked bars of the parts of the squared error for every real tensor by FLOOR and EVEN, and dots of what "
    "later conversions and Hopper's accumulator add.",
    hardware="any CPU",
    note="Slices of one small transformer.",
)
