"""The only place that sets a style: theme, widths, and one colour for each format."""

import matplotlib as mpl
import seaborn as sns

COLUMN_WIDTH = 3.5  # inches, one column of a two-column page
TEXT_WIDTH = 7.0

# Okabe and Ito's colours, which colour-blind readers tell apart, and three of Tol's where those run out. A block format
# has its element format's colour, unless another block format of the same elements has it already.
_ELEMENT_COLORS = {
    "E2M1": "#D55E00",
    "E2M3": "#009E73",
    "E3M2": "#56B4E9",
    "E4M3": "#0072B2",
    "E5M2": "#CC79A7",
    "INT8": "#999933",
    "E8M0": "#882255",
    "BF16": "#777777",
    "FP16": "#AAAAAA",
    "FP32": "#000000",
}
FORMAT_COLORS = {
    **_ELEMENT_COLORS,
    "MXFP4": _ELEMENT_COLORS["E2M1"],
    "NVFP4": "#E69F00",
    "MXFP6_E2M3": _ELEMENT_COLORS["E2M3"],
    "MXFP6_E3M2": _ELEMENT_COLORS["E3M2"],
    "MXFP8_E4M3": _ELEMENT_COLORS["E4M3"],
    "MXFP8_E5M2": _ELEMENT_COLORS["E5M2"],
    "MXINT8": _ELEMENT_COLORS["INT8"],
    "FP8_1X128": "#332288",
    "FP8_128X1": "#332288",
    "FP8_128X128": "#332288",
}


def use_theme() -> None:
    """Set matplotlib's style for every figure drawn after this: sizes for print at COLUMN_WIDTH, embedded fonts."""
    sns.set_theme(context="paper", style="ticks", palette="colorblind")
    mpl.rcParams.update(
        {
            "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
            "font.size": 7.5,
            "axes.titlesize": 7.5,
            "axes.labelsize": 7.5,
            "xtick.labelsize": 6.5,
            "ytick.labelsize": 6.5,
            "legend.fontsize": 6.5,
            "legend.title_fontsize": 6.5,
            "legend.frameon": False,
            "axes.titlelocation": "left",
            "axes.linewidth": 0.6,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "xtick.major.size": 3,
            "ytick.major.size": 3,
            "lines.linewidth": 1.2,
            "lines.markersize": 4,
            "figure.figsize": (COLUMN_WIDTH, 2.6),
            "figure.constrained_layout.use": True,
            "figure.dpi": 150,
            "savefig.dpi": 300,
            "savefig.bbox": "standard",
            "pdf.fonttype": 42,
        }
    )
