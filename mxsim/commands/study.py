"""`mxsim study`: the error of every tensor of a file in every format, as a table, CSV, JSON or pictures."""

import csv
import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mxsim.analysis.study import COLUMNS, DEFAULT_FORMATS, Skipped, Study, StudyRow, study_file
from mxsim.analysis.tensor_files import TensorFileError
from mxsim.blocks import BLOCK_FORMATS, ScaleRule
from mxsim.commands.bad_input import BadInput, choose, printable
from mxsim.commands.output_files import OutputFiles
from mxsim.commands.progress import progress_bar
from mxsim.commands.tables import Column, print_sections

_NAMES_SHOWN = 4  # of the tensors that were skipped for one reason
_NOTE = (
    "max, mean: relative error. sat.: beyond the largest value. zero: underflowed. subn.: stored as subnormal numbers. "
    "spread: largest difference of scale exponents among four neighbouring MXFP4 blocks. "
    "h=0, h=6: groups of 128 that FP4 -> FP8 keeps exactly at that headroom."
)


@dataclass(frozen=True)
class Outputs:
    """Where the results go besides the terminal."""

    csv: Path | None = None
    plots: Path | None = None
    as_json: bool = False


def study(
    file: Path,
    *,
    formats: Sequence[str],
    scale_rules: Sequence[str],
    axis: int | None,
    tensors: Sequence[str],
    outputs: Outputs,
    console: Console,
    progress_console: Console,
) -> None:
    """Study the file and show or write the results.

    Raises:
        BadInput: if the file, a name or an output cannot be used.
    """
    chosen = choose("format", formats, BLOCK_FORMATS) or list(DEFAULT_FORMATS)
    rules = choose("scale rule", scale_rules, ScaleRule.__members__)
    if outputs.csv is not None and outputs.csv.exists() and file.exists() and outputs.csv.samefile(file):
        raise BadInput(f"cannot write {outputs.csv}: it is the file to study")
    draw = _drawing() if outputs.plots is not None else None
    with OutputFiles() as files:
        csv_file = files.reserve(outputs.csv) if outputs.csv is not None else None
        plot_folder = files.folder(outputs.plots) if outputs.plots is not None else None
        try:
            with nullcontext() if outputs.as_json else progress_bar(progress_console, "studying") as progress:
                result = study_file(
                    file, formats=chosen, scale_rules=rules or None, axis=axis, tensors=tensors, progress=progress
                )
        except TensorFileError as error:
            raise BadInput(str(error)) from error
        if not result.rows:
            raise BadInput(f"{file}: nothing to study; {'; '.join(_skipped_lines(result.skipped))}")
        if csv_file is not None:
            _write_csv(csv_file, result)
        if draw is not None and plot_folder is not None:
            for name, figure in draw(result).items():
                figure.savefig(files.reserve(plot_folder / f"{name}.png"), format="png")
    if outputs.as_json:
        console.file.write(json.dumps(_json_document(file, result), indent=2) + "\n")
    else:
        _print(console, result, show_rules=bool(rules))


def _drawing() -> Callable[[Study], dict[str, Any]]:
    try:
        from mxsim.commands.study_plots import draw
    except ImportError as error:
        raise BadInput(f"--plot needs {error.name}; install it: pip install 'mxsim[figures]'") from error
    return draw


# ---------------------------------------------------------------------------------------------------------- terminal
def _print(console: Console, result: Study, *, show_rules: bool) -> None:
    has_poisoned = any(row.num_poisoned_blocks for row in result.rows)
    columns = [
        Column("format", "left"),
        *(Column(name) for name in ("SQNR dB", "max %", "mean %", "sat. %", "zero %")),
        Column("subn. %", is_optional=True),
        *([Column("NaN")] if has_poisoned else []),
        *(Column(name) for name in ("spread", "h=0 %", "h=6 %")),
    ]

    def cells(row: StudyRow) -> list[str]:
        return [
            f"{row.format} {row.scale_rule}" if show_rules and row.scale_rule else row.format,
            _decibels(row.sqnr_db),
            *(_percent(x) for x in (row.max_relative_error, row.mean_relative_error)),
            *(_percent(x) for x in (row.saturated, row.underflowed, row.subnormal)),
            *([str(row.num_poisoned_blocks)] if has_poisoned else []),
            "" if math.isnan(row.max_spread) else f"{row.max_spread:.0f}",
            *("" if row.num_groups == 0 else _percent(x) for x in (row.lossless_h0, row.lossless_h6)),
        ]

    by_tensor: dict[str, list[StudyRow]] = {}
    for row in result.rows:
        by_tensor.setdefault(row.tensor, []).append(row)
    sections = [(_heading(name, rows[0]), [cells(row) for row in rows]) for name, rows in by_tensor.items()]
    if len(by_tensor) > 1:
        sections.append((Text(f"all {len(by_tensor)} tensors", style="bold"), [cells(row) for row in result.totals]))
    note = _NOTE + (" NaN: blocks with a NaN or an infinity inside, left out of the rest." if has_poisoned else "")
    print_sections(console, columns, sections, note)
    for line in _skipped_lines(result.skipped):
        console.print(f"Skipped: {line}", style="dim", markup=False)


def _heading(name: str, row: StudyRow) -> Text:
    shape = " x ".join(str(size) for size in row.shape) or "scalar"
    return Text(printable(name), style="bold").append(f"  {shape}, {row.dtype}", style="not bold dim")


def _skipped_lines(skipped: Sequence[Skipped]) -> list[str]:
    """One line for each reason and set of formats, naming the first few tensors."""
    formats: dict[tuple[str, str], list[str]] = {}
    for entry in skipped:
        formats.setdefault((entry.tensor, entry.reason), []).extend([entry.format] if entry.format else [])
    tensors: dict[tuple[str, str], list[str]] = {}
    for (tensor, reason), names in formats.items():
        tensors.setdefault((", ".join(names), reason), []).append(printable(tensor))
    lines = []
    for (left_out, reason), of in tensors.items():
        more = f" and {len(of) - _NAMES_SHOWN} more" if len(of) > _NAMES_SHOWN else ""
        lines.append(f"{left_out + ' of ' if left_out else ''}{', '.join(of[:_NAMES_SHOWN])}{more} ({reason})")
    return lines


def _decibels(x: float) -> str:
    return "-" if math.isnan(x) else "exact" if math.isinf(x) else f"{x:.2f}"


def _percent(share: float) -> str:
    """A share in percent with two decimals; 0 and 100 stand for exactly that."""
    hundredths = 100 * share
    if math.isnan(hundredths):
        return "-"
    if hundredths in (0, 100):
        return f"{hundredths:.0f}"
    if hundredths < 0.01:
        return "<0.01"
    if 99.99 < hundredths < 100:
        return ">99.99"
    return f"{hundredths:.2f}" if hundredths < 1000 else f"{hundredths:.3g}"


# ------------------------------------------------------------------------------------------------------------- files
def _write_csv(path: Path, result: Study) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for record in result.records():
            record["shape"] = "x".join(str(size) for size in record["shape"])
            writer.writerow({name: "" if _is_nan(value) else value for name, value in record.items()})


def _json_document(file: Path, result: Study) -> dict[str, Any]:
    """NaN becomes null, infinity (the SQNR of an exact tensor) the string "inf"."""

    def record(row: StudyRow) -> dict[str, Any]:
        cells = {name: None if _is_nan(value) else value for name, value in asdict(row).items()}
        return {name: "inf" if value == math.inf else value for name, value in cells.items()}

    return {
        "file": str(file),
        "rows": [record(row) for row in result.rows],
        "totals": [record(row) for row in result.totals],
        "skipped": [asdict(entry) for entry in result.skipped],
    }


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
