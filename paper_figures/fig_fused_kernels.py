"""Figure 3: "fused dequantize and layout kernels are 1.6 to 1.9 times as fast as the unfused sequence".

Here 3.1 to 3.4 times for rows (dequantize, quantize) and 16 to 18 for columns, where torch's transpose between the two
takes four fifths of the time. With a transposing quantizer in its place (dequantize, quantize to columns: two kernels
of this library) columns gain 3.2 to 3.4. The paper's baseline is unknown, and its GPU an 80 GB Hopper, not an H200.

Inputs: benchmarks/results/kernels_h200.json, from mxsim bench on an H200. Any CPU, a second.
"""

import json
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from mxsim.plotting import COLUMN_WIDTH, FORMAT_COLORS, use_theme
from paper_figures.exhibit import Exhibit, Measured, Row, compared
from paper_figures.files import DATA, RESULTS, write_table

TOPIC = "fused_kernels"
MEASURED = RESULTS / "kernels_h200.json"
PAPER = (1.6, 1.9)
# Fused op -> the unfused sequences: as timed whole, or as the sum of two ops that were timed one by one.
WHOLE = {
    "fp4_row_to_fp8_row": "fp4_to_bf16, bf16_to_fp8_row",
    "fp4_row_to_fp8_col": "fp4_to_bf16, t().contiguous(), bf16_to_fp8_row",
}
SUMS = {"fp4_row_to_fp8_col": ("fp4_to_bf16", "bf16_to_fp8_col")}


def compute(folder: Path = DATA, *, measured: Path = MEASURED) -> pd.DataFrame:
    """A row for each fused op, shape and unfused sequence. measured: sequence, or sum of ops that were timed alone."""
    report = json.loads(measured.read_text(encoding="utf-8"))
    provenance = report["provenance"]
    times = {(op["op"], op["shape"]): op["us"] for op in report["ops"] if not op["variant"]}
    rows = []
    for rival in report["comparisons"]:
        fused = rival["op"]
        if WHOLE.get(fused) == rival["rival"]:
            rows.append((fused, rival["shape"], rival["rival"], "sequence", times[fused, rival["shape"]], rival["us"]))
            if fused in SUMS:
                parts = SUMS[fused]
                total = sum(times[part, rival["shape"]] for part in parts)
                rows.append((fused, rival["shape"], ", ".join(parts), "sum", times[fused, rival["shape"]], total))
    table = pd.DataFrame(rows, columns=["fused", "shape", "unfused", "measured", "fused_us", "unfused_us"])
    table["speedup"] = (table["unfused_us"] / table["fused_us"]).round(3)
    return write_table(table.assign(device=provenance["device"], torch=provenance["torch"]), TOPIC, folder)


def draw(df: pd.DataFrame) -> Figure:
    use_theme()
    figure = Figure(figsize=(COLUMN_WIDTH, 2.6))
    axes = figure.subplots()
    names = list(dict.fromkeys(zip(df["fused"], df["unfused"], strict=True)))
    shapes = list(dict.fromkeys(df["shape"]))
    height = 0.8 / len(shapes)
    for number, shape in enumerate(shapes):
        rows = df[df["shape"] == shape]
        y = [
            names.index(pair) + (number - (len(shapes) - 1) / 2) * height
            for pair in zip(rows["fused"], rows["unfused"], strict=True)
        ]
        bars = axes.barh(
            y, rows["speedup"], height * 0.9, color=FORMAT_COLORS["MXFP4"], alpha=1 - 0.3 * number, label=shape
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=6, padding=2)
    axes.axvspan(*PAPER, color="0.6", alpha=0.5, linewidth=0, label="paper: 1.6 to 1.9")
    axes.axvline(1, color="black", linewidth=0.6)
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set(xlim=(0.9, 30), xlabel="unfused over fused (times)", ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), [f"{fused}\nagainst {_wrapped(unfused)}" for fused, unfused in names])
    axes.tick_params(axis="y", length=0, labelsize=6)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _wrapped(sequence: str) -> str:
    """At most two steps a line."""
    steps = sequence.split(", ")
    return ",\n".join(", ".join(steps[i : i + 2]) for i in range(0, len(steps), 2))


def _rows_of_page(df: pd.DataFrame) -> list[Row]:
    largest = df[df["shape"] == df["shape"].iloc[0]]
    return [
        compared(f"{r.fused} against {r.unfused}, {r.shape}", r.speedup, PAPER, unit="x", digits=1)
        for r in largest.itertuples()
    ]


EXHIBIT = Exhibit(
    title="Figure 3: fused kernels",
    alt="Bars, log scale: how many times as long an unfused sequence takes as the fused kernel, for rows and columns "
    "at three shapes, with the paper's range as a band.",
    claim="Fused kernels for dequantization and layout are 1.6 to 1.9 times as fast as the unfused sequence.",
    paper_hardware="80 GB Hopper",
    hardware="one H200",
    rows=_rows_of_page,
    note="The paper's unfused sequence is not known: our largest figure is against torch's transpose, which is slow, "
    "and is hardly a merit of the fused kernel; an H200 also has more memory bandwidth than an 80 GB Hopper.",
    measured=Measured(("bench",)),
)
