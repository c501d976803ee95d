"""The files of a run: its log, its diagnostics, what it was, and the checkpoint to go on from.

log.csv          a row each log_every steps, where the loss on held-out text was measured, and at the end
diagnostics.csv  a row for each layer and activation, each diagnose_every steps
run.json         configuration, recipe, corpus, device, versions, and how the run ended
checkpoint.pt    everything that the next step depends on

Rows are on disk as soon as they are written; the other two files are replaced whole, so that a crash leaves old ones.
"""

import csv
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mxsim.train.config import ConfigError, TrainConfig
from mxsim.train.diagnostics import Diagnosis

FILES = LOG, DIAGNOSTICS, RUN, CHECKPOINT = "log.csv", "diagnostics.csv", "run.json", "checkpoint.pt"


class RunError(ValueError):
    """A folder that the run cannot use; the message is one line."""


class LogRow(NamedTuple):
    """A row of log.csv. NaN is an empty cell."""

    step: int  # steps done
    tokens: int  # trained on so far
    train_loss: float  # nats a token, mean over the steps since the row before
    validation_loss: float  # nats a token on held-out text; empty where it was not measured
    grad_norm: float  # of this step, before clipping
    learning_rate: float  # of this step
    max_load: float  # tokens of the busiest expert of any layer in this step, balanced experts having 1
    tokens_per_s: float  # since the row before, without what measures
    seconds: float  # since the start, with everything, over all parts of a resumed run


class RunFolder:
    """The files of a run in a folder, made if missing; rows after step `first` are dropped, `first` None drops all.

    Raises:
        RunError: if the folder cannot be written.
    """

    def __init__(self, path: Path, *, first: int | None) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._log = _Table(path / LOG, LogRow._fields, first)
            self._diagnostics = _Table(
                path / DIAGNOSTICS, ("step", *(field.name for field in fields(Diagnosis))), first
            )
        except OSError as error:
            raise RunError(f"cannot write into {path}: {error.strerror}") from error

    def log(self, row: LogRow) -> None:
        self._log.write(row)

    def diagnose(self, step: int, diagnoses: Iterable[Diagnosis]) -> None:
        for diagnosis in diagnoses:
            self._diagnostics.write((step, *asdict(diagnosis).values()))

    def write_run(self, document: dict[str, Any]) -> None:
        text = json.dumps(document, indent=2) + "\n"
        _replace(self.path / RUN, lambda file: file.write_text(text, encoding="utf-8"))

    def save(self, state: dict[str, Any]) -> None:
        _replace(self.path / CHECKPOINT, lambda file: torch.save(state, file))

    def close(self) -> None:
        self._log.close()
        self._diagnostics.close()


def read_log(folder: Path) -> list[LogRow]:
    """The rows of log.csv, in order."""
    with (folder / LOG).open(newline="", encoding="utf-8") as file:
        return [
            LogRow(*(int(cell) if i < 2 else float(cell or "nan") for i, cell in enumerate(row)))
            for row in list(csv.reader(file))[1:]
        ]


def read_run(folder: Path) -> dict[str, Any] | None:
    """run.json, or None where there is none.

    Raises:
        RunError: if it is damaged.
    """
    try:
        document: dict[str, Any] = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {folder / RUN}: {error}") from error
    return document


def read_config(folder: Path) -> TrainConfig | None:
    """What the folder's run was made with, or None where there is no run.

    Raises:
        RunError: if run.json cannot be read, or has no configuration of this version.
    """
    document = read_run(folder)
    if document is None:
        return None
    try:
        return TrainConfig(**document["config"])
    except (KeyError, TypeError, ConfigError) as error:
        raise RunError(f"{folder}: its run.json is of another version of mxsim ({error})") from error


def load_checkpoint(
    folder: Path, device: torch.device, config: TrainConfig, corpus_sha256: str
) -> dict[str, Any] | None:
    """The state that `RunFolder.save` wrote, or None where there is none.

    Raises:
        RunError: if it is damaged, or of another configuration or text.
    """
    file = folder / CHECKPOINT
    if not file.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
        saved_config, saved_sha256 = state["config"], state["corpus_sha256"]
    except Exception as error:  # torch.load has no error of its own
        raise RunError(f"cannot read {file}: {' '.join(str(error).split())[:200]}") from error
    differing = [name for name, value in asdict(config).items() if saved_config.get(name) != value]
    if differing:
        name = differing[0]
        raise RunError(
            f"cannot go on from {file}: its {name} is {saved_config.get(name)!r}, not {getattr(config, name)!r}"
        )
    if saved_sha256 != corpus_sha256:
        raise RunError(f"cannot go on from {file}: it was trained on another text")
    return state


def exists(folder: Path) -> bool:
    """Whether the folder holds a run."""
    return any((folder / name).exists() for name in FILES)


class _Table:
    """A CSV file that grows row by row."""

    def __init__(self, path: Path, columns: tuple[str, ...], first: int | None) -> None:
        kept = [] if first is None else _rows_until(path, len(columns), first)
        _replace(path, lambda file: _write_table(file, [list(columns), *kept]))
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, row: Iterable[Any]) -> None:
        self._writer.writerow("" if isinstance(cell, float) and math.isnan(cell) else cell for cell in row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _rows_until(path: Path, num_columns: int, step: int) -> list[list[str]]:
    """Whole rows up to a step."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in list(csv.reader(file))[1:] if len(row) == num_columns]
    return [row for row in rows if int(row[0]) <= step]


def _write_table(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name, to the disk, then give it its name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
