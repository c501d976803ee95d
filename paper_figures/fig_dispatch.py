"""Sending tokens to their experts in MXFP4 rather than BF16 or FP8, quantization and conversion included, on two H200s.

Left and middle: the forward dispatch by its parts, one chunk, the slowest rank; a dot is the same in its best number of
chunks, where quantizing and packing overlap with the all-to-all. Right: the whole layer, forward + backward.

Input: benchmarks/results/ep_h200.json, which `mxsim bench ep --json benchmarks/results/ep_h200.json` writes on a
machine with two GPUs. No GPU is needed to draw it.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mxsim.plotting import FORMAT_COLORS, TEXT_WIDTH, use_theme
from paper_figures.exhibit import Exhibit, Measured, Row, saved_by_mxfp4
from paper_figures.files import DATA, RESULTS, NotMeasured, write_table

TOPIC = "dispatch"
MEASURED = RESULTS / "ep_h200.json"
RECIPES = {"BF16": "BF16", "FP8": "FP8_1X128", "MXFP4": "MXFP4"}  # recipe -> format that travels
PARTS = ("quantize", "pack", "all-to-all", "regroup", "convert")
COLUMNS = ("device", "torch", "backend", "tokens", "recipe", "num_chunks", "quantity", "value")


def compute(folder: Path = DATA, *, measured: Path = MEASURED) -> pd.DataFrame:
    """A row for each measured quantity: microseconds of the parts, of the dispatch and of a step; bytes.

    Raises:
        NotMeasured: where there is no result of `mxsim bench ep`.
    """
    if not measured.exists():
        raise NotMeasured(
            f"{measured.name} is not in {measured.parent.name}; on two GPUs: mxsim bench ep --json {measured.name}"
        )
    found = json.loads(measured.read_text())
    provenance = [found["provenance"][name] for name in COLUMNS[:3]]
    return write_table(pd.DataFrame([[*provenance, *row] for row in _rows(found)], columns=COLUMNS), TOPIC, folder)


def _rows(found: dict[str, Any]) -> Iterator[tuple[int, str, int, str, float]]:
    for d in found["dispatch"]:
        key = (d["tokens"], d["recipe"], d["num_chunks"])
        for part, us in d["parts"].items():
            yield *key, f"{part} us", us
        yield *key, "dispatch us", d["us"]
        yield *key, "bytes to other ranks", d["bytes_to_others"]
    for s in found["layer"]:
        key = (s["tokens"], s["recipe"], 1)
        for name, value in (("step us", s["us"]), ("kept bytes", s["kept_bytes"]), ("peak bytes", s["peak_bytes"])):
            yield *key, name, value


def draw(df: pd.DataFrame) -> Figure:
    use_theme()
    tokens = sorted(df["tokens"].unique())
    figure = Figure(figsize=(TEXT_WIDTH, 2.3))
    panels = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1, 1, 1)})
    for axes, count in zip(panels, (tokens[0], tokens[-1]), strict=False):
        _draw_dispatch(axes, df[df["tokens"] == count], count)
    _draw_steps(panels[2], df[df["quantity"] == "step us"], tokens)
    handles: list[Any] = [Patch(color=_shade("0.25", number), label=part) for number, part in enumerate(PARTS)]
    dot = {"color": "black", "marker": "o", "markersize": 2.5, "linestyle": ""}
    handles.append(Line2D([], [], label="all of it, in the best number of chunks", **dot))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _draw_dispatch(axes: Axes, df: pd.DataFrame, tokens: int) -> None:
    whole = df[df["quantity"] == "dispatch us"]
    for place, (recipe, fmt) in enumerate(RECIPES.items()):
        parts = df[(df["recipe"] == recipe) & (df["num_chunks"] == 1)].set_index("quantity")["value"]
        start = 0.0
        for number, part in enumerate(PARTS):
            ms = parts[f"{part} us"] / 1e3
            axes.bar(place, ms, 0.7, bottom=start, color=_shade(FORMAT_COLORS[fmt], number), linewidth=0)
            start += ms
        axes.annotate(
            f"{start:.2f}", (place, start), (0, 4), textcoords="offset points", ha="center", va="bottom", fontsize=6
        )
        best = whole[whole["recipe"] == recipe]["value"].min() / 1e3
        axes.plot(place, best, "o", color="black", markersize=2.5)
    axes.set_xticks(range(len(RECIPES)), list(RECIPES))
    axes.set(title=f"dispatch, {tokens} tokens a GPU", ylabel="time of the dispatch (ms)")
    axes.set_ylim(0, 1.15 * axes.dataLim.ymax)


def _draw_steps(axes: Axes, steps: pd.DataFrame, tokens: Sequence[int]) -> None:
    width = 0.8 / len(RECIPES)
    for number, (recipe, fmt) in enumerate(RECIPES.items()):
        us = steps[steps["recipe"] == recipe].set_index("tokens")["value"].reindex(tokens)
        places = [place + (number - 1) * width for place in range(len(tokens))]
        axes.bar(places, us / tokens, width, color=FORMAT_COLORS[fmt], label=recipe, linewidth=0)
    axes.set_xticks(range(len(tokens)), [str(count) for count in tokens])
    axes.set(title="layer, forward + backward", xlabel="batch of a GPU (tokens)", ylabel="time a token (us)")
    axes.set_ylim(0, 1.2 * axes.dataLim.ymax)
    axes.legend(ncols=len(RECIPES), loc="upper center", columnspacing=1, handlelength=1.2)


def _shade(color: str, number: int) -> tuple[float, float, float]:
    """The colour for the all-to-all, lighter for what is done around it."""
    lightness = {"all-to-all": 0.0, "quantize": 0.75, "pack": 0.55, "regroup": 0.4, "convert": 0.65}[PARTS[number]]
    red, green, blue = (x + (1 - x) * lightness for x in to_rgb(color))
    return red, green, blue


def _rows_of_page(df: pd.DataFrame) -> list[Row]:
    whole = df[(df["num_chunks"] == 1) & (df["tokens"] == df["tokens"].max())]
    rows = []
    for quantity, what in (("bytes to other ranks", "bytes sent"), ("dispatch us", "time of the dispatch")):
        value = whole[whole["quantity"] == quantity].set_index("recipe")["value"]
        rows += saved_by_mxfp4(what, value, is_claimed=quantity == "bytes to other ranks")
    return rows


EXHIBIT = Exhibit(
    title="Dispatch: volume and time",
    alt="Stacked bars of the forward dispatch's parts in BF16, FP8 and MXFP4 at the smallest and the largest batch, "
    "and bars of the whole layer's time a token by batch.",
    claim="Expert parallelism sends more than 50 % less.",
    paper_hardware="256 Hopper GPUs of 80 GB, through DeepEP",
    hardware="two H200s of one host, through NCCL",
    rows=_rows_of_page,
    note="With its scales MXFP4 has 4.25 bits an element and FP8 8.25, so that against FP8 just less than half is "
    "saved, whatever the hardware; two GPUs of one host have no slow links, where fewer bytes would gain more.",
    measured=Measured(("bench", "ep"), num_gpus=2),
)
