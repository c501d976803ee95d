"""A normal value is off by at most 2**-(M+1) of itself, M mantissa bits; below the smallest normal the spacing stays.

There the relative error doubles with every binade down, to 100 %: exponent bits buy range, mantissa bits precision.

Inputs: none, the formats themselves. Any CPU, a second.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mxsim.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, INT8, FloatFormat, round_to
from mxsim.plotting import COLUMN_WIDTH, FORMAT_COLORS, use_theme
from paper_figures.exhibit import Exhibit
from paper_figures.files import DATA, write_table

TOPIC = "format_spacing"
FORMATS = (E2M1, E2M3, E3M2, INT8, E4M3, E5M2, BF16)  # the last as what the others are rounded from
BINADES = range(-19, 17)
POINTS_PER_BINADE = 4096  # evenly spaced from 2**e on, so that every tie of at most 11 mantissa bits is among them


def compute(folder: Path = DATA) -> pd.DataFrame:
    """For each format and binade [2**exponent, 2**(exponent + 1)) up to the largest finite value:

    num_values that the format has there, their spacing, and the largest and root mean square of
    |round_to(x) - x| / x over the points. Where spacing is wider than the binade num_values is 0.
    """
    rows = [_binade(fmt, exponent) for fmt in FORMATS for exponent in BINADES if exponent <= fmt.emax]
    return write_table(pd.DataFrame(rows), TOPIC, folder)


def _binade(fmt: FloatFormat, exponent: int) -> dict[str, object]:
    x = np.ldexp(1 + np.arange(POINTS_PER_BINADE) / POINTS_PER_BINADE, exponent)
    x = x[x <= fmt.max_finite]
    rounded = round_to(x, fmt).astype(np.float64)
    error = np.abs(rounded - x) / x
    return {
        "format": fmt.name,
        "exponent": exponent,
        "num_values": int(np.unique(rounded[rounded == x]).size),
        "spacing": float(np.ldexp(1.0, max(exponent, fmt.emin) - fmt.mantissa_bits)),
        "max_relative_error": round(float(error.max()), 6),
        "rms_relative_error": round(float(np.sqrt(np.square(error).mean())), 6),
    }


def draw(df: pd.DataFrame) -> Figure:
    use_theme()
    figure = Figure(figsize=(COLUMN_WIDTH, 4.6))
    values, spacing, error = figure.subplots(3, sharex=True, gridspec_kw={"height_ratios": [1.05, 1.2, 1.2]})
    _draw_values(values, df)
    _draw_steps(spacing, df, "spacing")
    _draw_steps(error, df, "max_relative_error", unit=0.01)
    spacing.set_yscale("log", base=2)
    spacing.set_yticks([2.0**e for e in range(-24, 17, 8)])
    spacing.set(ylabel="spacing (dimensionless)", title="(b) distance between neighbours")
    error.set_yscale("log")
    error.set_yticks([1, 10, 100], ["1", "10", "100"])
    error.set(ylabel="largest relative error (%)", title="(c) rounding to nearest, M mantissa bits", ylim=(0.2, 130))
    for x, y, mantissa_bits in ((3.3, 20, 1), (13.5, 13, 2), (9.3, 5.9, 3), (13.5, 0.47, 7)):
        error.text(x, y, f"M = {mantissa_bits}", fontsize=6.5, va="bottom" if x > 10 else "center")
    for axes in (spacing, error):
        axes.minorticks_off()
    exponents = range(-16, 17, 4)
    error.set_xticks(list(exponents), [f"$2^{{{e}}}$" for e in exponents])
    error.set(xlabel="magnitude |x| (dimensionless)", xlim=(BINADES[0], BINADES[-1] + 1))
    return figure


def _draw_values(axes: Axes, df: pd.DataFrame) -> None:
    """A row of ticks for each format, one tick a value; its label is the legend of the other panels."""
    names = list(df["format"].unique())
    for row, (name, table) in enumerate(df.groupby("format", sort=False)):
        for exponent, num_values, spacing in table[["exponent", "num_values", "spacing"]].itertuples(index=False):
            x = np.log2(2.0**exponent + spacing * np.arange(num_values))
            axes.vlines(x, row - 0.36, row + 0.36, color=FORMAT_COLORS[name], linewidth=0.35)
    axes.set_yticks(range(len(names)), names, weight="bold")
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_color(FORMAT_COLORS[name])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(title="(a) every positive value")


def _draw_steps(axes: Axes, df: pd.DataFrame, column: str, unit: float = 1) -> None:
    """A step a binade. Formats of as many mantissa bits coincide: the one of wider range is the wider line, below."""
    for name, table in df.groupby("format", sort=False):
        wide = name in (E4M3.name, E5M2.name)
        edges = [*table["exponent"], table["exponent"].iloc[-1] + 1]
        width, order = (2.4, 1) if wide else (1, 2)
        axes.stairs(
            table[column] / unit, edges, baseline=None, color=FORMAT_COLORS[name], linewidth=width, zorder=order
        )


EXHIBIT = Exhibit(
    title="Spacing of the formats' values",
    alt="Three panels over the magnitude: every positive value of each element format, the distance between "
    "neighbours, and the largest relative error of rounding to nearest.",
    hardware="any CPU",
    note="Follows from the formats alone.",
)
