"""The conversions run at 0.83 to 1.02 of a copy of as many bytes on large tensors, columns included.

At 32768 x 7168 columns have 0.83 to 0.88 and rows from 0.89 (FP8 to FP4) to 1.02 (BF16 to FP4); weights' tiles, made
once an optimizer step, 0.71 to 0.78. Small tensors cost more, as launches and tails weigh: at 4096 x 7168 conversions
have 0.63 to 0.91. The paper gives no such figure; the same laboratory's FP8 transpose moves 0.2 to 0.8 TB/s.

Inputs: benchmarks/results/kernels_h200.json, from mxsim bench on an H200: a copy moves 4.24 TB/s. Any CPU, a second.
"""

import json
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from mxsim.plotting import COLUMN_WIDTH, FORMAT_COLORS, use_theme
from paper_figures.exhibit import Exhibit, Measured
from paper_figures.files import DATA, RESULTS, write_table

TOPIC = "kernel_ceiling"
MEASURED = RESULTS / "kernels_h200.json"


def compute(folder: Path = DATA, *, measured: Path = MEASURED) -> pd.DataFrame:
    """Bytes read and written a second, and their share of a copy's, of every op and shape."""
    report = json.loads(measured.read_text(encoding="utf-8"))
    provenance = report["provenance"]
    rows = [
        {
            "op": f"{op['op']} {op['variant']}".strip(),
            "shape": op["shape"],
            "us": op["us"],
            "tb_per_s": op["tb_per_s"],
            "of_copy": op["of_copy"],
            "copy_tb_per_s": report["copy"]["tb_per_s"],
            "device": provenance["device"],
            "torch": provenance["torch"],
        }
        for op in report["ops"]
    ]
    return write_table(pd.DataFrame(rows), TOPIC, folder)


_MARKERS = {"32768x7168": "o", "32768x7168/32": "s", "24576x2048": "D", "4096x7168": "v"}


def draw(df: pd.DataFrame) -> Figure:
    use_theme()
    figure = Figure(figsize=(COLUMN_WIDTH, 3.4))
    axes = figure.subplots()
    best = df.groupby("op")["of_copy"].max().sort_values(ascending=False)
    y = {op: number for number, op in enumerate(best.index)}
    for shape, marker in _MARKERS.items():
        rows = df[df["shape"] == shape]
        fill = FORMAT_COLORS["MXFP4"] if shape.startswith("32768x7168") else "none"
        label = shape.replace("/32", " in 32 experts")
        axes.plot(
            rows["of_copy"], rows["op"].map(y), marker, color=FORMAT_COLORS["MXFP4"], markerfacecolor=fill, label=label
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.text(0.995, len(y) - 0.55, f"a copy: {df['copy_tb_per_s'].iloc[0]:.2f} TB/s", ha="right", fontsize=6.5)
    axes.set_yticks(list(y.values()), list(y))
    axes.grid(axis="y", linewidth=0.3, color="0.85")
    axes.tick_params(axis="y", length=0)
    axes.set(ylim=(len(y) - 0.3, -0.6), xlabel="bytes a second (fraction of a copy's)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


EXHIBIT = Exhibit(
    title="Kernels as a fraction of a copy",
    alt="Dots of each kernel's bytes a second as a fraction of a copy's, by shape, with a line at 1.",
    hardware="one H200",
    note="The share of a copy is of the same run on the same GPU; other GPUs have other copies.",
    measured=Measured(("bench",)),
)
