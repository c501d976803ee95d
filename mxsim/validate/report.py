"""What a validation found: counts by op, the first mismatches, JSON and a table."""

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console, Group
from rich.text import Text

import mxsim
from mxsim.validate.compare import Mismatch

MAX_MISMATCHES_KEPT = 8  # of each step of an op, spread over its cases
SIMULATOR = "the NumPy simulator"
_MAX_PROBLEMS_SHOWN = 12


@dataclass(frozen=True)
class CaseProblem:
    """A case whose results could not be compared: the candidate raised, or its results have another form."""

    case: str
    message: str


@dataclass
class OpReport:
    """One op. seconds: in the candidate; reference_seconds: in making inputs and expectations."""

    op: str
    num_cases: int = 0
    num_elements: int = 0
    num_mismatches: int = 0
    seconds: float = 0.0
    reference_seconds: float = 0.0
    by_step: Counter[str] = field(default_factory=Counter)
    cases_by_step: Counter[str] = field(default_factory=Counter)
    mismatches: list[Mismatch] = field(default_factory=list)
    problems: list[CaseProblem] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> cases
    notes: list[str] = field(default_factory=list)  # what was found out about the candidate

    @property
    def ok(self) -> bool:
        """Whether every case was compared equal; False where there was none."""
        return self.num_mismatches == 0 and not self.problems and self.num_cases > 0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "op": self.op,
            "ok": self.ok,
            "cases": self.num_cases,
            "elements": self.num_elements,
            "mismatches": self.num_mismatches,
            "seconds": round(self.seconds, 4),
            "reference_seconds": round(self.reference_seconds, 4),
            "mismatches_by_step": dict(self.by_step.most_common()),
            "cases_by_step": dict(self.cases_by_step.most_common()),
            "first_mismatches": [m.to_json() for m in self.mismatches],
            "problems": [{"case": p.case, "message": p.message} for p in self.problems],
            "skipped_cases": dict(self.skipped),
            "notes": list(self.notes),
        }


@dataclass
class Report:
    """All ops of one run. note: about a peer, or what was not run; provenance: see `mxsim.provenance`."""

    candidate: str
    device: str
    size: str
    note: str = ""
    against: str = SIMULATOR
    provenance: dict[str, Any] = field(default_factory=dict)
    ops: list[OpReport] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every op is."""
        return bool(self.ops) and all(op.ok for op in self.ops)

    @property
    def num_elements(self) -> int:
        """Elements compared."""
        return sum(op.num_elements for op in self.ops)

    @property
    def num_mismatches(self) -> int:
        """Elements that differ."""
        return sum(op.num_mismatches for op in self.ops)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "ok": self.ok,
            "candidate": self.candidate,
            "against": self.against,
            "device": self.device,
            "size": self.size,
            "note": self.note,
            "seconds": round(self.seconds, 3),
            "elements": self.num_elements,
            "mismatches": self.num_mismatches,
            "versions": {
                "mxsim": mxsim.__version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
            },
            "provenance": self.provenance,
            "ops": [op.to_json() for op in self.ops],
        }

    def __rich__(self) -> Group:
        return Group(*_parts(self))

    def __str__(self) -> str:
        console = Console(width=140, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self, soft_wrap=True)
        return capture.get()


def _parts(report: Report) -> Iterator[Any]:
    yield Text(f"{report.candidate} on {report.device} against {report.against}, {report.size}", style="bold")
    yield from _table(report.ops)
    for op in report.ops:
        yield from _details(op)
    if report.note:
        yield Text(report.note, "yellow")
    verdict = "equal bit for bit" if report.ok else f"{report.num_mismatches:,} mismatches"
    total = f"{report.num_elements:,} elements compared in {report.seconds:.1f} s: {verdict}"
    yield Text(total, "green" if report.ok else "red")


def _table(ops: Sequence[OpReport]) -> Iterator[Text]:
    """Lines as wide as they need: a narrow terminal wraps them, and no number is cut."""
    rows = [("op", "cases", "elements", "mismatches", "seconds")]
    for op in ops:
        seconds = f"{op.seconds + op.reference_seconds:.1f}"
        rows.append((op.op, f"{op.num_cases}", f"{op.num_elements:,}", f"{op.num_mismatches:,}", seconds))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    verdicts = [
        Text("equal", "green") if op.ok else Text("DIFFERS" if op.num_cases else "no case", "red") for op in ops
    ]
    for (name, *numbers), verdict in zip(rows, [Text(), *verdicts], strict=True):
        cells = [name.ljust(widths[0]), *(n.rjust(width) for n, width in zip(numbers, widths[1:], strict=True))]
        line = Text("  ".join(cells), "" if verdict else "dim")
        yield line.append("  ").append_text(verdict) if verdict else line


def _details(op: OpReport) -> Iterator[Any]:
    for reason, count in op.skipped.items():
        yield Text(f"{op.op}: {count} cases skipped, {reason}", "yellow")
    for note in op.notes:
        yield Text(f"{op.op}: {note}", "dim")
    if op.ok or not op.num_cases:
        return
    yield Text(f"\n{op.op}", "bold red")
    for problem in op.problems[:_MAX_PROBLEMS_SHOWN]:
        yield Text(f"  case {problem.case!r}: {problem.message}")
    if len(op.problems) > _MAX_PROBLEMS_SHOWN:
        yield Text(f"  and {len(op.problems) - _MAX_PROBLEMS_SHOWN} more cases")
    for step, count in op.by_step.most_common():
        yield Text(f"  NUMERICS {step}: {count:,} elements in {op.cases_by_step[step]} cases")
        for m in op.mismatches:
            if m.step == step:
                yield Text(f"      {_line(m)}", "dim")


def differences(report: Report) -> Group:
    """The report of a peer: what differs by class, with an example of each, and no verdict."""
    parts: list[Any] = [Text(f"{report.candidate} on {report.device} beside {report.against}, {report.size}", "bold")]
    if report.note:
        parts.append(Text(report.note, "dim"))
    for op in report.ops:
        parts.append(
            Text(f"\n{op.op}: {op.num_mismatches:,} of {op.num_elements:,} elements differ, {op.num_cases} cases")
        )
        parts.extend(Text(f"{count} cases skipped, {reason}", "yellow") for reason, count in op.skipped.items())
        for step, count in op.by_step.most_common():
            parts.append(Text(f"  NUMERICS {step}: {count:,} elements in {op.cases_by_step[step]} cases"))
            parts.extend(Text(f"      {_line(m)}", "dim") for m in op.mismatches if m.step == step)
        messages = Counter(problem.message for problem in op.problems)
        parts.extend(Text(f"  {count} cases: {message}", "yellow") for message, count in messages.most_common())
    return Group(*parts)


def _line(m: Mismatch) -> str:
    parts = [
        f"{m.result}{list(m.index)}: got {m.got} ({m.got_value}), want {m.want} ({m.want_value})",
        f" at scale {m.scale}" if m.scale else "",
        f"; {m.input}" if m.input else "",
        f"; case {m.case!r}",
    ]
    return "".join(parts)
