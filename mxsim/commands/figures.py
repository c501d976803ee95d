"""`mxsim figures`: the exhibits of paper_figures computed, or measured again, and drawn."""

import importlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import mxsim
from mxsim.commands.bad_input import BadInput, choose
from mxsim.commands.progress import progress_bar
from mxsim.commands.tables import Column, print_table

RECOMPUTED = Path("recomputed")  # where --recompute writes if no folder is named


@dataclass(frozen=True)
class Request:
    """Which exhibits, and whether to measure again. out: None: paper_figures itself, or RECOMPUTED."""

    names: Sequence[str] = ()  # none: all
    recompute: bool = False
    out: Path | None = None


def paper_figures(module: str, *, command: str) -> Any:
    """A module of paper_figures, which lies beside the package in a checkout and nowhere else.

    Raises:
        BadInput: outside a checkout, or without the libraries that draw.
    """
    for root in (Path(mxsim.__file__).resolve().parents[1], Path.cwd()):
        if (root / "paper_figures" / "exhibit.py").is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            break
    else:
        raise BadInput(f"{command} needs a checkout of the repository: the exhibits are not part of the package")
    try:
        return importlib.import_module(f"paper_figures.{module}")
    except ModuleNotFoundError as error:
        raise BadInput(f"{command} needs {error.name}; install mxsim[figures]") from error


def list_figures(console: Console) -> None:
    """Print the exhibits' names, titles and what measures them."""
    exhibit = paper_figures("exhibit", command="figures")
    rows = []
    for topic in exhibit.TOPICS:
        found = exhibit.load(topic).EXHIBIT
        measured = found.measured
        rows.append([topic, found.title, f"mxsim {' '.join(measured.command)}" if measured else "", found.hardware])
    print_table(
        console,
        "Exhibits",
        [
            Column("name", "left"),
            Column("title", "left"),
            Column("measured by", "left", is_optional=True),
            Column("hardware", "left", is_optional=True),
        ],
        rows,
    )


def figures(request: Request, *, console: Console, progress_console: Console) -> None:
    """Compute the tables and draw the pictures, a line an exhibit; where they lie in paper_figures, README.md too.

    Raises:
        BadInput: for an unknown name, a folder that cannot be written, or outside a checkout.
    """
    exhibit, files = (paper_figures(name, command="figures") for name in ("exhibit", "files"))
    topics = choose("exhibit", request.names, {name: name for name in exhibit.TOPICS}) or exhibit.TOPICS
    out = request.out or (RECOMPUTED if request.recompute else None)
    tables, pictures = (out, out) if out else (files.DATA, files.OUT)
    try:
        pictures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {pictures}: {error.strerror}") from error
    measure = _Measure(pictures) if request.recompute else None

    start = time.perf_counter()
    lines: list[str] = []
    with progress_bar(progress_console) as update:
        for number, topic in enumerate(topics):
            if update is not None:
                update(number, len(topics), topic)
            try:
                line = f"{topic}: {_make(exhibit.load(topic), measure, tables, pictures)}"
            except files.NotMeasured as error:
                line = f"{topic}: left out: {error}"
            except OSError as error:
                raise BadInput(f"{topic}: {error.filename or pictures}: {error.strerror}") from error
            if update is None:
                console.print(line, markup=False, soft_wrap=True)
            else:  # not into the bar
                lines.append(line)
        if out is None:
            page = paper_figures("page", command="figures").write()
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    written = f"tables in {_shown(tables)}" + (f", {_shown(page)} brought up to date" if out is None else "")
    count = "1 exhibit" if len(topics) == 1 else f"{len(topics)} exhibits"
    console.print(f"{count} in {time.perf_counter() - start:.1f} s; {written}", markup=False, soft_wrap=True)


def _make(module: Any, measure: "_Measure | None", tables: Path, pictures: Path) -> str:
    """Compute and draw one; what was done."""
    start = time.perf_counter()
    measured, found = module.EXHIBIT.measured, {}
    remark = ""
    if measure is not None and measured is not None:
        file, reason = measure(measured)
        if file is not None:
            found["measured"] = file
        remark = f" (measured: {_shown(file)})" if file else f" (the committed result, not measured again: {reason})"
    names = importlib.import_module("paper_figures.files").save_figure(
        module.draw(module.compute(tables, **found)), module.TOPIC, pictures
    )
    return f"{time.perf_counter() - start:.1f} s: {', '.join(map(_shown, names))}{remark}"


class _Measure:
    """Runs each measuring command once and says where its result lies, or why there is none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[Any, tuple[Path | None, str]] = {}

    def __call__(self, measured: Any) -> tuple[Path | None, str]:
        if measured not in self._results:
            reason = f"takes {measured.by_hand}" if measured.by_hand else _lacking(measured.num_gpus)
            self._results[measured] = (None, reason) if reason else self._run(measured)
        return self._results[measured]

    def _run(self, measured: Any) -> tuple[Path | None, str]:
        file = self._folder / f"{'_'.join(measured.command)}.json"
        command = [sys.executable, "-m", "mxsim.cli", *measured.command, "--device", "cuda", "--json", str(file)]
        run = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if run.returncode:
            *_, last = run.stderr.split("\n")[:-1] or [f"exit status {run.returncode}"]
            return None, f"mxsim {' '.join(measured.command)} failed: {last.removeprefix('mxsim: ')}"
        return file, ""


def _lacking(num_gpus: int) -> str:
    """What this machine lacks to measure on that many GPUs; empty: nothing."""
    try:
        import torch
    except ImportError:
        return "needs torch"
    needed = "a Hopper GPU" if num_gpus == 1 else f"{num_gpus} Hopper GPUs"
    found = sum(torch.cuda.get_device_capability(i) == (9, 0) for i in range(torch.cuda.device_count()))
    return "" if found >= num_gpus else f"needs {needed}, {found or 'none'} here"


def _shown(path: Path) -> str:
    """Relative to where the command runs, if it lies below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
