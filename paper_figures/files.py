"""Where tables and pictures go, and where the real tensors come from."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from mxsim.analysis import open_tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA = Path(__file__).resolve().parent / "data"
OUT = Path(__file__).resolve().parent / "out"
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


class NotMeasured(Exception):
    """What a figure of measured numbers lacks, and the command that makes it."""


def write_table(table: pd.DataFrame, topic: str, folder: Path = DATA) -> pd.DataFrame:
    """Write folder/<topic>.csv and return the table as that file gives it back."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{topic}.csv"
    table.to_csv(path, index=False, lineterminator="\n")
    return pd.read_csv(path)


def save_figure(figure: "Figure", topic: str, folder: Path = OUT) -> list[Path]:
    """Write folder/<topic>.pdf and .png, without a date, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{topic}.pdf", folder / f"{topic}.png"]
    figure.savefig(paths[0], metadata={"CreationDate": None})
    figure.savefig(paths[1])
    return paths


def real_tensors() -> dict[str, np.ndarray]:
    """Weights (float32) and activations (bfloat16) of all-MiniLM-L6-v2 by name; data/minilm_slices.json describes them.

    In order of names: activations, then weights, each from the first layer to the last.
    """
    with open_tensors(DATA / "minilm_slices.safetensors") as tensors:
        return {tensor.name: np.array(tensor.load()) for tensor in sorted(tensors, key=lambda tensor: tensor.name)}
