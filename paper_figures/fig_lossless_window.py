"""MXFP4 -> FP8 is exact while the scales of a block differ by at most 2**(8 + headroom): 2**14 by the default, 6.

The largest spread measured in a real transformer is 2**9 between four neighbouring blocks of a row, 2**8 between the
blocks of 128 rows: outside the window of headroom 0, which rounds a few elements, and five binades inside headroom 6's.
The E4M3 codes are all normal up to a spread of 2**(5 + headroom).

Inputs: data/minilm_slices.safetensors in MXFP4 by the FLOOR rule; every E2M1 code. Any CPU, two seconds.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from mxsim.blocks import MXFP4, BlockTensor, fp4_row_to_fp8_row, quantize
from mxsim.formats import E2M1, E4M3, E8M0
from mxsim.plotting import COLUMN_WIDTH, FORMAT_COLORS, use_theme
from paper_figures.exhibit import Exhibit
from paper_figures.files import DATA, real_tensors, write_table

TOPIC = "lossless_window"
HEADROOMS = range(7)
SPREADS = range(20)
LOSSLESS_BOUND, NORMAL_BOUND = 8, 5  # plus headroom; the theorem that the data are held against

_BLOCK = MXFP4.block_size
_BIAS = E8M0.bias


def compute(folder: Path = DATA) -> pd.DataFrame:
    """Counts against the spread d: how far, in powers of two, a block's scale lies below the largest beside it.

    quantity exact_codes, subnormal_codes: of the 16 E2M1 codes, converted at the headroom in `source`, how many keep
    their value and how many become E4M3 subnormals. row_blocks, column_blocks: of the 128-blocks of the tensor in
    `source`, how many have the spread d between their largest and smallest scale.
    """
    rows = [*_conversion(), *_measured()]
    return write_table(pd.DataFrame(rows, columns=["quantity", "source", "spread", "count", "total"]), TOPIC, folder)


def _conversion() -> Iterator[tuple[str, str, int, int, int]]:
    for headroom in HEADROOMS:
        for spread in SPREADS:
            # Two blocks of all codes, the second 2**spread below the first.
            codes = np.tile(np.arange(E2M1.num_codes, dtype=np.uint8), 2 * _BLOCK // E2M1.num_codes)
            source = BlockTensor(codes, np.array([_BIAS, _BIAS - spread], np.uint8), MXFP4)
            result = fp4_row_to_fp8_row(source, headroom=headroom)
            lower = slice(_BLOCK, _BLOCK + E2M1.num_codes)
            exact = source.dequantize(np.float64)[lower] == result.dequantize(np.float64)[lower]
            magnitude = result.codes[lower] & E4M3.magnitude_mask
            subnormal = (magnitude > 0) & (magnitude < 1 << E4M3.mantissa_bits)
            for quantity, flags in (("exact_codes", exact), ("subnormal_codes", subnormal)):
                yield quantity, f"headroom {headroom}", spread, int(flags.sum()), flags.size


def _measured() -> Iterator[tuple[str, str, int, int, int]]:
    for name, tensor in real_tensors().items():
        scales = quantize(tensor, MXFP4).scales.astype(int)  # differences of codes are those of exponents
        num_rows, num_blocks = scales.shape
        groups = {
            "row_blocks": scales.reshape(num_rows, num_blocks // 4, 4).swapaxes(1, 2),
            "column_blocks": scales.reshape(num_rows // 128, 128, num_blocks),
        }  # (.., scales of a 128-block, ..); 32 columns share theirs, and are counted once
        for quantity, group in groups.items():
            counts = np.bincount(np.ptp(group, axis=1).ravel(), minlength=len(SPREADS))
            assert len(counts) == len(SPREADS)
            for spread in SPREADS:
                yield quantity, name, spread, int(counts[spread]), int(counts.sum())


def draw(df: pd.DataFrame) -> Figure:
    use_theme()
    figure = Figure(figsize=(COLUMN_WIDTH, 4.6))
    window, row, column = figure.subplots(3, sharex=True, gridspec_kw={"height_ratios": [1.3, 1, 1]})
    _draw_window(window, df)
    _draw_measured(row, df[df["quantity"] == "row_blocks"])
    _draw_measured(column, df[df["quantity"] == "column_blocks"])
    window.set(ylabel="headroom (binades)", title="(a) values kept by the conversion")
    row.set(title="(b) measured: four blocks of a row")
    column.set(title="(c) measured: blocks of 128 rows")
    column.set(xlabel="spread d of the scales' exponents (binades)", xlim=(-0.5, len(SPREADS) - 0.5))
    column.set_xticks(range(0, len(SPREADS), 2))
    for axes in (row, column):
        for headroom in (HEADROOMS[0], HEADROOMS[-1]):
            axes.axvline(LOSSLESS_BOUND + headroom + 0.5, color="black", linewidth=0.8)
            axes.text(LOSSLESS_BOUND + headroom + 0.7, 70, f"headroom {headroom}\nexact to here", va="top", fontsize=6)
    column.legend(loc="lower left")
    return figure


def _draw_window(axes: Axes, df: pd.DataFrame) -> None:
    exact = df[df["quantity"] == "exact_codes"]
    share = (100 * exact["count"] / exact["total"]).to_numpy().reshape(len(HEADROOMS), len(SPREADS))
    palette = LinearSegmentedColormap.from_list("kept", ["white", FORMAT_COLORS["FP8_1X128"]])
    image = axes.pcolormesh(SPREADS, HEADROOMS, share, cmap=palette, vmin=0, vmax=100)
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((0.68, 0.12, 0.27, 0.06)), orientation="horizontal")
    bar.set_ticks([0, 50, 100])
    bar.ax.xaxis.set_ticks_position("top")
    bar.ax.xaxis.set_label_position("top")
    bar.set_label("codes kept (%)", fontsize=6.5)
    bar.ax.tick_params(labelsize=6, length=2, pad=1)
    bar.outline.set_linewidth(0.5)
    edges = np.arange(len(HEADROOMS) + 1) - 0.5
    last = np.asarray(HEADROOMS) + 0.5
    style = {"orientation": "horizontal", "baseline": None, "linewidth": 1.2}
    axes.stairs(NORMAL_BOUND + last, edges, color="white", linestyle=(0, (2, 1)), **style)
    axes.stairs(LOSSLESS_BOUND + last, edges, color="black", **style)
    axes.text(1.5, 3, "all kept,\nall normal\n(d ≤ 5 + h)", color="white", va="center", fontsize=6.5)
    axes.annotate(
        "left of it\nall kept\n(d ≤ 8 + h)",
        (11.5, 3.5),
        (15, 4.5),
        fontsize=6.5,
        va="center",
        arrowprops={"arrowstyle": "-", "linewidth": 0.8, "color": "black"},
    )
    axes.set_yticks(list(HEADROOMS))


def _draw_measured(axes: Axes, df: pd.DataFrame) -> None:
    """Of each tensor, the share of 128-blocks whose spread is at least d; a line ends at the largest spread."""
    ends = {}
    for kind, style in (("activation", "-"), ("weight", ":")):
        tables = {name: table for name, table in df.groupby("source") if name.startswith(kind)}
        for number, (name, table) in enumerate(tables.items()):
            at_least = 100 * table["count"][::-1].cumsum()[::-1] / table["total"]
            at_least = at_least[at_least > 0].to_numpy()
            edges = np.arange(len(at_least) + 1) - 0.5
            label = f"{kind}s ({len(tables)})" if number == 0 else None
            color = FORMAT_COLORS["MXFP4"]
            axes.stairs(at_least, edges, baseline=None, color=color, linestyle=style, linewidth=0.8, label=label)
            ends[name] = (edges[-1], at_least[-1])
    widest = max(ends, key=lambda name: ends[name])
    name = widest.partition(".")[2].replace(".", " ")
    axes.annotate(name, ends[widest], (3, 0), textcoords="offset points", va="center", fontsize=6)
    axes.set_yscale("log")
    axes.set(ylabel="blocks of spread\n≥ d (%)", ylim=(0.1, 130))
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.minorticks_off()


EXHIBIT = Exhibit(
    title="Lossless window of MXFP4 to FP8",
    alt="Share of E2M1 codes that conversion keeps, by headroom and spread of the scales, above the share of a real "
    "transformer's blocks that spread as far, in rows and in columns; none reaches the limit of headroom 6.",
    hardware="any CPU",
    note="The window is proved; the spreads are those of one small transformer, and a larger model may have wider "
    "ones.",
)
