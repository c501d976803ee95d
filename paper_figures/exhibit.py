"""What an exhibit says of itself, and the list of all: `mxsim figures`, README.md and the report read these.

An exhibit is a module fig<number>_<topic>.py, the number optional, with TOPIC, compute, draw and

    EXHIBIT = Exhibit(
        title="Figure 4: cost of quantization",
        alt="Bars of FP8's cost over MXFP4's for grouped and dense linears, with the paper's ranges behind them.",
        claim="Quantization costs a grouped linear 1.43 to 1.53 times less than in FP8.",  # the paper's, in our words
        paper_hardware="80 GB Hopper",
        hardware="one H200",
        rows=lambda df: [compared("grouped", df["ratio"][0], (1.43, 1.53), unit="x")],
        note="One honest sentence on why the two differ.",
        measured=Measured(("bench", "moe")),  # if it is of measured numbers: compute takes measured=, a file of these
    )

Exhibits of the library's own leave claim and paper_hardware out, and may leave rows and measured out.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pandas as pd

# The paper's exhibits, in its order; the library's own follow, by name.
PAPER_ORDER = ("table1", "memory_236b", "fused_kernels", "quantization_cost", "loss_curves", "dispatch", "storage")
_MODULES = {
    path.stem.partition("_")[2]: path.stem for path in sorted(Path(__file__).resolve().parent.glob("fig*_*.py"))
}
TOPICS = [*(topic for topic in PAPER_ORDER if topic in _MODULES), *sorted(_MODULES.keys() - set(PAPER_ORDER))]


class Row(NamedTuple):
    """One of the paper's figures beside ours, as text."""

    what: str
    paper: str
    ours: str
    residual: str


def compared(what: str, ours: float, paper: float | tuple[float, float], *, unit: str = "", digits: int = 2) -> Row:
    """residual = ours - paper, or from the nearer end of paper's range, and 0 inside.

    >>> compared("rows", 3.41, (1.6, 1.9), unit="x", digits=1)
    Row(what='rows', paper='1.6 to 1.9x', ours='3.4x', residual='+1.5x')
    """
    low, high = paper if isinstance(paper, tuple) else (paper, paper)
    residual = ours - min(max(ours, low), high)
    bounds = dict.fromkeys(f"{bound:.{digits}f}" for bound in (low, high))
    return Row(what, f"{' to '.join(bounds)}{unit}", f"{ours:.{digits}f}{unit}", f"{residual:+z.{digits}f}{unit}")


def saved_by_mxfp4(what: str, value: Mapping[str, float], *, is_claimed: bool) -> list[Row]:
    """MXFP4 against FP8 and BF16 in percent; is_claimed: the paper says more than 50 % less.

    value: of each recipe.

    >>> saved_by_mxfp4("bytes", {"BF16": 8.0, "FP8": 4.0, "MXFP4": 2.1}, is_claimed=True)[0]
    Row(what='bytes, MXFP4 against FP8', paper='more than 50 % less', ours='-47.5 %', residual='+2.5 points')
    """
    rows = []
    for other in ("FP8", "BF16"):
        percent = 100 * (value["MXFP4"] / value[other] - 1)
        missing = max(percent + 50, 0)
        claim = ("more than 50 % less", f"{missing:+.1f} points" if missing else "none")
        paper, residual = claim if is_claimed else ("not given", "")
        rows.append(Row(f"{what}, MXFP4 against {other}", paper, f"{percent:+.1f} %", residual))
    return rows


@dataclass(frozen=True)
class Measured:
    """The command of mxsim, without its --json FILE, that measures what the exhibit shows; `compute(measured=FILE)`."""

    command: tuple[str, ...]  # ("bench", "moe")
    num_gpus: int = 1
    by_hand: str = ""  # what it takes, if `mxsim figures --recompute` shall not start it: "two hours on an H200"


@dataclass(frozen=True)
class Exhibit:
    """See the module's docstring."""

    title: str
    alt: str  # what the picture shows, for one who cannot see it
    hardware: str
    note: str
    rows: Callable[[pd.DataFrame], list[Row]] | None = None
    claim: str = ""
    paper_hardware: str = ""
    measured: Measured | None = None


def load(topic: str) -> ModuleType:
    """The module of the exhibit."""
    return importlib.import_module(f"paper_figures.{_MODULES[topic]}")
