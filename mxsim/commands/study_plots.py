"""The pictures of `mxsim study --plot`."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mxsim.analysis.study import Study, StudyRow
from mxsim.blocks import MXFP4
from mxsim.plotting import COLUMN_WIDTH, FORMAT_COLORS, TEXT_WIDTH, use_theme

_MAX_NAMED_TENSORS = 40  # beyond that, names are too many to read
_MARKERS = {None: "o", "FLOOR": "o", "RCEIL": "s", "CEIL": "^", "EVEN": "D"}
_LINES = {"FLOOR": "-", "RCEIL": "--", "CEIL": ":", "EVEN": "-."}
_LOSSLESS_SPREAD = {"headroom 0": 8, "headroom 6": 14}  # NUMERICS 4.5: exact for every code up to here


def draw(study: Study) -> dict[str, Figure]:
    """The figures by name: sqnr, shares, and spread where MXFP4 was studied."""
    use_theme()
    figures = {"sqnr": draw_sqnr(study), "shares": draw_shares(study)}
    if any(row.spread_counts for row in study.totals):
        figures["spread"] = draw_spread(study)
    return figures


def draw_sqnr(study: Study) -> Figure:
    """SQNR of every tensor: one line for each tensor, or for many tensors one for each format."""
    rows = [row for row in study.rows if np.isfinite(row.sqnr_db)]
    tensors = list(dict.fromkeys(row.tensor for row in rows))
    cases = list(dict.fromkeys(_label(row) for row in rows))
    is_named = len(tensors) <= _MAX_NAMED_TENSORS
    lines = tensors if is_named else cases
    figure = Figure(figsize=(TEXT_WIDTH, 0.8 + 0.17 * len(lines) if is_named else 1.0 + 0.35 * len(lines)))
    axes = figure.add_subplot()
    random = np.random.default_rng(0)
    for row in rows:
        position = lines.index(row.tensor) if is_named else lines.index(_label(row)) + random.uniform(-0.25, 0.25)
        axes.plot(row.sqnr_db, position, _MARKERS[row.scale_rule], **_style(row), alpha=0.9 if is_named else 0.5)
    if not is_named:
        for total in study.totals:
            if _label(total) in lines and np.isfinite(total.sqnr_db):
                y = lines.index(_label(total))
                axes.plot([total.sqnr_db] * 2, [y - 0.38, y + 0.38], color="black", linewidth=1.2)
    axes.set_yticks(range(len(lines)), lines)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlabel("SQNR (dB)")
    axes.grid(axis="x" if not is_named else "both", linewidth=0.4)
    if is_named:
        examples = {_label(row): row for row in rows}
        handles = [
            Line2D([], [], linestyle="", marker=_MARKERS[row.scale_rule], **_style(row), label=label)
            for label, row in examples.items()
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5))
    else:
        axes.set_title(f"{len(tensors)} tensors; black: all of them together")
    return figure


def draw_shares(study: Study) -> Figure:
    """Shares of elements saturated, underflowed and subnormal over all tensors, a group of bars for each format."""
    kinds = {"saturated": "#222222", "underflowed": "#888888", "subnormal": "#cccccc"}
    figure = Figure(figsize=(COLUMN_WIDTH, 0.9 + 0.38 * len(study.totals)))
    axes = figure.add_subplot()
    for i, (kind, color) in enumerate(kinds.items()):
        positions = np.arange(len(study.totals)) + (i - 1) * 0.27
        axes.barh(positions, [100 * getattr(row, kind) for row in study.totals], 0.25, color=color, label=kind)
    axes.set_yticks(range(len(study.totals)), [_label(row) for row in study.totals])
    for label, row in zip(axes.get_yticklabels(), study.totals, strict=True):
        label.set_color(FORMAT_COLORS[row.format])
    axes.invert_yaxis()
    axes.set_xlabel("share of all elements (%)")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def draw_spread(study: Study) -> Figure:
    """How far the scale exponents of four neighbouring MXFP4 blocks differ, against what FP4 -> FP8 keeps exactly."""
    totals = [row for row in study.totals if row.format == MXFP4.name and row.spread_counts]
    figure = Figure(figsize=(COLUMN_WIDTH, 2.4))
    axes = figure.add_subplot()
    highest = 0
    for row in totals:
        shares = 100 * np.array(row.spread_counts) / sum(row.spread_counts)
        axes.plot(
            np.where(shares > 0, shares, np.nan),  # no line across what does not occur
            linestyle=_LINES[row.scale_rule],
            marker=_MARKERS[row.scale_rule],
            color=FORMAT_COLORS[row.format],
            label=row.scale_rule,
        )
        highest = max(highest, len(shares) - 1)
    for name, spread in _LOSSLESS_SPREAD.items():
        axes.axvline(spread, color="#888888", linestyle="--", linewidth=0.8)
        axes.annotate(
            f"{name} ", (spread, 1), xycoords=("data", "axes fraction"), ha="right", va="top", rotation=90, fontsize=6.5
        )
    axes.set_yscale("log")
    axes.set_xlim(-0.5, max(highest, 14) + 1.5)
    axes.set_xlabel("exponent spread of four MXFP4 blocks (binades)")
    axes.set_ylabel("groups of 128 elements (%)")
    axes.set_title("FP4 → FP8 is exact for every code up to the dashed lines")
    if len(totals) > 1:
        axes.legend(title="scale rule")
    return figure


def _label(row: StudyRow) -> str:
    return f"{row.format} {row.scale_rule}" if row.scale_rule else row.format


def _style(row: StudyRow) -> dict[str, object]:
    return {"color": FORMAT_COLORS[row.format], "markersize": 3.5, "markeredgewidth": 0}
