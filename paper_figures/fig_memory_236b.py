"""236B: "peak memory is 6.9 % (MLP and shared experts recomputed) and 7.2 % (all MoE) below FP8, 11 % below BF16".

DeepSeek-V2's configuration, estimated with nothing calibrated on these figures. The paper's layout is unknown, and
whether its percentages are of the other recipe's peak or, as in Table 1, of 80 GB. Three layouts of 256 GPUs give 13 to
15 % below FP8, or 10 points of 80 GB: up to twice the paper's figure, which this estimate does not explain. It has the
paper's order (with all MoE recomputed slightly more), and 11 to 16 % below BF16 at the first scope; with all MoE
recomputed BF16 keeps little and the FP8 copies of the weights weigh: 3 to 7 %. Peaks are means of the stages.

Inputs: none; mxsim.moe.memory. Any CPU, a second.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from mxsim.moe.memory import DEEPSEEK_V2, Assumptions, Module, Run, judge
from mxsim.moe.recipe import Recipe
from mxsim.plotting import COLUMN_WIDTH, FORMAT_COLORS, use_theme
from paper_figures.exhibit import Exhibit, Row
from paper_figures.files import DATA, write_table

TOPIC = "memory_236b"
GPU_GB = 80
SCOPES = {
    "MLP + shared experts": frozenset({Module.MLP, Module.SHARED_EXPERTS}),
    "all MoE": frozenset({Module.MLP, Module.SHARED_EXPERTS, Module.MOE_EXPERTS}),
}
LAYOUTS = ((256, 32, 8), (256, 16, 16), (256, 8, 32))  # GPUs, stages, GPUs that share experts
PAPER = {
    ("MLP + shared experts", "FP8"): -6.9,
    ("all MoE", "FP8"): -7.2,
    ("MLP + shared experts", "BF16"): -11.0,
    ("all MoE", "BF16"): -11.0,
}


def compute(folder: Path = DATA) -> pd.DataFrame:
    """MXFP4's mean peak memory against FP8's and BF16's.

    percent: of the other recipe's; points: of 80 GB. residual: percent less the paper's.
    """
    return write_table(pd.DataFrame(list(_rows())), TOPIC, folder)


def _rows() -> Iterator[dict[str, object]]:
    for gpus, pipeline, expert_parallel in LAYOUTS:
        for scope_name, scope in SCOPES.items():
            run = Run(DEEPSEEK_V2, Recipe.MXFP4, scope, pipeline, expert_parallel, Assumptions(num_gpus=gpus))
            ours = _mean_gb(run)
            for other in (Recipe.FP8, Recipe.BF16):
                theirs, paper = _mean_gb(replace(run, recipe=other)), PAPER[scope_name, other.name]
                percent = 100 * (ours / theirs - 1)
                yield {
                    "num_gpus": gpus,
                    "pipeline": pipeline,
                    "expert_parallel": expert_parallel,
                    "scope": scope_name,
                    "against": other.name,
                    "mxfp4_gb": round(ours, 2),
                    "other_gb": round(theirs, 2),
                    "percent": round(percent, 2),
                    "points": round(100 * (ours - theirs) / GPU_GB, 2),
                    "paper_percent": paper,
                    "residual": round(percent - paper, 2),
                }


def _mean_gb(run: Run) -> float:
    return judge(run, GPU_GB).mean_share * GPU_GB


_COLORS = {"FP8": FORMAT_COLORS["FP8_1X128"], "BF16": FORMAT_COLORS["BF16"]}
_MARKERS = "osD"


def draw(df: pd.DataFrame) -> Figure:
    use_theme()
    figure = Figure(figsize=(COLUMN_WIDTH, 2.8))
    axes = figure.subplots()
    groups = list(PAPER)
    for y, (scope, against) in enumerate(groups):
        rows = df[(df["scope"] == scope) & (df["against"] == against)]
        for offset, marker, row in zip(np.linspace(-0.2, 0.2, len(rows)), _MARKERS, rows.itertuples(), strict=True):
            label = (
                f"{row.num_gpus} GPUs: {row.pipeline} stages, experts over {row.expert_parallel}" if y == 0 else None
            )
            axes.plot(row.percent, y + offset, marker, color=_COLORS[against], markersize=3.5, label=label)
        axes.plot([PAPER[scope, against]] * 2, [y - 0.35, y + 0.35], "k", label="paper" if y == 0 else None)
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(groups)), [f"{scope},\nagainst {against}" for scope, against in groups])
    axes.set(ylim=(len(groups) - 0.5, -0.5), xlabel="MXFP4's peak against the other's (%)")
    axes.tick_params(axis="y", length=0)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1)
    return figure


def _rows_of_page(df: pd.DataFrame) -> list[Row]:
    """The layout nearest to the paper, and the range of all."""
    rows = []
    for (against, scope), cells in df.groupby(["against", "scope"], sort=False):
        low, high = cells["percent"].min(), cells["percent"].max()
        near, far = sorted(cells["residual"], key=abs)[:: len(cells) - 1]
        rows.append(
            Row(
                f"against {against}, {scope} recomputed",
                f"{PAPER[scope, against]:.1f} %",
                f"{low:.1f} to {high:.1f} %",
                f"{near:+.1f} to {far:+.1f} points",
            )
        )
    return rows


EXHIBIT = Exhibit(
    title="236B: peak memory of MXFP4",
    alt="MXFP4's peak memory against FP8's and BF16's in percent, a marker for each of three layouts of 256 GPUs, "
    "with a line at the paper's figure.",
    claim="MXFP4's peak is 6.9 % (MLP and shared experts recomputed) and 7.2 % (all MoE) below FP8's, 11 % below "
    "BF16's.",
    paper_hardware="Hopper GPUs of 80 GB, layout not public",
    hardware="no GPU: an estimate with nothing calibrated on these figures",
    rows=_rows_of_page,
    note="Not explained: the estimate saves up to twice what the paper reports against FP8, and the layout, or whether "
    "its percentages are of the other recipe's peak or of 80 GB, is not known.",
)
