"""`mxsim bench`: the kernels' times as tables, or JSON."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.text import Text

from mxsim.commands.bad_input import BadInput, choose
from mxsim.commands.output_files import OutputFiles
from mxsim.commands.progress import progress_bar
from mxsim.commands.tables import Column, print_sections, print_table

if TYPE_CHECKING:
    from mxsim.bench import Report
    from mxsim.bench.ep import EpReport
    from mxsim.bench.moe import MoeReport
    from mxsim.bench.report import Comparison, Measurement
    from mxsim.bench.runner import Progress
    from mxsim.bench.targets import Target, Verdict

WRONG_STATUS = 1
AnyReport = TypeVar("AnyReport", "Report", "EpReport", "MoeReport")


@dataclass(frozen=True)
class Request:
    """What to measure, and how much. file: where the JSON goes; None: to the terminal, in place of the tables."""

    ops: Sequence[str] = ()  # none: all
    shapes: Sequence[str] = ()  # none: bench's own
    device: str | None = None  # None: CUDA where there is a device
    is_quick: bool = False
    as_json: bool = False
    file: Path | None = None


def bench(request: Request, *, console: Console, progress_console: Console) -> int:
    """Run, print the tables or the JSON, and return the exit status: 1 if an op failed or gave wrong results.

    Raises:
        BadInput: if something in the request cannot be used.
    """
    check_file(request.file, as_json=request.as_json)
    try:
        import torch

        from mxsim.bench import OPS, run
        from mxsim.bench.cases import parse_shape
    except ImportError as error:
        raise BadInput(f"bench needs torch ({error}); install mxsim[train] or torch") from error

    ops = choose("op", request.ops, {name: name for name in OPS})
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def measure(progress: "Progress | None") -> "Report":
        shapes = [parse_shape(text) for text in request.shapes]
        return run(device, ops, shapes, quick=request.is_quick, progress=progress)

    def show(report: "Report") -> None:
        _print(console, report, on_device=not device.startswith("cpu"))

    return run_benchmark(
        measure,
        show,
        as_json=request.as_json,
        file=request.file,
        console=console,
        progress_console=progress_console,
    )


def check_file(file: Path | None, *, as_json: bool) -> None:
    """Raises BadInput for a file without --json."""
    if file is not None and not as_json:
        raise BadInput(f"{file}: a file is for the JSON, needed --json {file}")


def run_benchmark(
    measure: "Callable[[Progress | None], AnyReport]",
    show: Callable[[AnyReport], object],
    *,
    as_json: bool,
    file: Path | None,
    console: Console,
    progress_console: Console,
) -> int:
    """Run a benchmark, print its JSON or show its tables, and return the exit status: 1 if its report is not ok.

    measure: called with what shows progress, (text, done, to do), or None where nobody looks. file: where the JSON
    goes, beside the tables.

    Raises:
        BadInput: if the file cannot be written, or for a ValueError of the benchmark.
    """
    with OutputFiles() if file is not None else nullcontext() as files:
        target = files.reserve(file) if files is not None and file is not None else None
        try:
            with progress_bar(progress_console) as update:
                report = measure(update and (lambda text, done, to_do: update(done, to_do, text)))
        except ValueError as error:
            raise BadInput(str(error)) from error
        text = json.dumps(report.to_json(), indent=2) + "\n"
        if target is not None:
            target.write_text(text, encoding="utf-8")
    if as_json and file is None:
        console.file.write(text)
    else:
        show(report)
    return 0 if report.ok else WRONG_STATUS


# -------------------------------------------------------------------------------------------------------------- tables
def _print(console: Console, report: "Report", *, on_device: bool) -> None:
    console.print(device_line(report.provenance), style="bold", soft_wrap=True)
    gibibytes, rate, time = report.copy.num_bytes / 2**30, rate_text(report.copy.bytes_per_s), report.copy.timing.us
    console.print(f"A copy of {gibibytes:g} GiB, read and written: {rate}, {time_text(time)}", soft_wrap=True)
    console.print(f"Results compared first, bit by bit, with {report.checked_against}.", soft_wrap=True)
    if report.measurements:
        console.print()
        _print_measurements(console, report.measurements)
    if report.comparisons:
        console.print()
        _print_comparisons(console, report.comparisons)
    if report.overheads:
        has_targets = any(o.target for o in report.overheads)
        print_table(
            console,
            "Python's time of one call, 4 x 128" + (", the queue of the device being short" if on_device else ""),
            [
                Column("op", "left"),
                Column("us"),
                Column("torch.empty_strided of its results"),
                *([Column("at most, aim"), Column("", "left")] if has_targets else []),
            ],
            [
                [
                    o.name,
                    f"{o.us:.1f}",
                    f"{o.empty_us:.1f}",
                    *([bounds_text(o.target, "{:.0f}"), verdict_text(o)] if has_targets else []),
                ]
                for o in report.overheads
            ],
        )
    _print_verdicts(console, report)


def _print_measurements(console: Console, measurements: Sequence["Measurement"]) -> None:
    per_element = any(m.of == "elements_per_s" for m in measurements)
    has_targets = any(m.target for m in measurements)
    columns = [
        Column("op", "left"),
        Column("time"),
        Column("MB"),
        Column("rate"),
        Column("of copy"),
        *([Column("M elements/s")] if per_element else []),
        *([Column("at least, aim"), Column("", "left")] if has_targets else []),
        Column("spread", is_optional=True),
        Column("measured as", "left", is_optional=True),
    ]

    def cells(m: "Measurement") -> list[str]:
        bounds = bounds_text(m.target, "{:.2f}") if m.of == "of_copy" else bounds_text(m.target, "{:.0f}", 1e-6)
        timing = m.timing
        how = f"{timing.method.value}, {timing.num_samples} of {timing.calls_per_sample}"
        how += ", in cache" if m.is_in_cache else ""
        how += "" if timing.is_queue_full else ", waited for Python"
        return [
            m.case.name,
            time_text(timing.us),
            f"{m.case.num_bytes / 1e6:.1f}",
            rate_text(m.bytes_per_s),
            f"{m.of_copy:.3f}",
            *([f"{m.elements_per_s / 1e6:.0f}"] if per_element else []),
            *([bounds, verdict_text(m)] if has_targets else []),
            f"{100 * (timing.max_us - timing.min_us) / timing.us:.1f} %",
            how,
        ]

    by_shape: dict[Any, list[list[str]]] = {}
    for m in measurements:
        by_shape.setdefault(m.case.shape, []).append(cells(m))
    sections = []
    for shape, rows in by_shape.items():
        heading = Text(f"{shape.rows} x {shape.columns}", style="bold")
        if sizes := shape.group_sizes:
            heading.append(f"  {len(sizes)} experts of {min(sizes)} to {max(sizes)} rows", style="not bold dim")
        sections.append((heading, rows))
    print_sections(console, columns, sections, "Bytes by count: each input read once, each result written once.")


def _print_comparisons(console: Console, comparisons: Sequence["Comparison"]) -> None:
    has_targets = any(c.target for c in comparisons)
    columns = [
        Column("beside an op", "left"),
        Column("time"),
        Column("op is faster"),
        *([Column("at least, aim"), Column("", "left")] if has_targets else []),
        Column("rate", is_optional=True),
        Column("", "left", is_optional=True),
    ]
    by_op: dict[tuple[str, Any, str], list[list[str]]] = {}
    for c in comparisons:
        cells = [
            c.rival,
            time_text(c.rival_timing.us),
            f"{c.ratio:.2f}x",
            *([bounds_text(c.target, "{:.1f}x"), verdict_text(c)] if has_targets else []),
            rate_text(1e6 * c.rival_bytes / c.rival_timing.us),
            c.note,
        ]
        by_op.setdefault((c.ours.case.name, c.ours.case.shape, time_text(c.ours.timing.us)), []).append(cells)
    sections = []
    for (name, shape, time), rows in by_op.items():
        heading = Text(name, style="bold").append(f"  {shape.rows} x {shape.columns}, {time}", style="not bold dim")
        sections.append((heading, rows))
    print_sections(console, columns, sections, "")


def _print_verdicts(console: Console, report: "Report") -> None:
    """Which figures are missed and how many are reached, then what went wrong."""
    from mxsim.bench.targets import Verdict

    verdicts = list(report.verdicts())
    console.print()
    if verdicts:
        print_count(console, [verdict for verdict, _ in verdicts])
        for verdict, text in verdicts:
            if verdict is Verdict.MISSED:
                console.print(f"  missed: {text}", style="yellow", soft_wrap=True, markup=False)
    print_notes(console, report)


def print_count(console: Console, verdicts: "Sequence[Verdict]") -> None:
    """How many figures are reached."""
    from mxsim.bench.targets import Verdict

    num_missed, num_aims = (sum(v is which for v in verdicts) for which in (Verdict.MISSED, Verdict.AIM))
    console.print(
        f"{len(verdicts) - num_missed} of {len(verdicts)} figures reached, {num_aims} of them with the aim.",
        style="yellow" if num_missed else "green",
    )


def print_notes(console: Console, report: "Report | MoeReport | EpReport") -> None:
    """What was left out, what went wrong, and how long it took."""
    for note in report.notes:
        console.print(note, style="dim", soft_wrap=True, markup=False)
    by_message: dict[str, list[str]] = {}
    for case, message in report.problems:
        by_message.setdefault(message, []).append(case)
    for message, cases in by_message.items():
        more = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
        console.print(f"{', '.join(cases[:3])}{more}: {message}", style="red", soft_wrap=True, markup=False)
    console.print(f"{report.seconds:.0f} s", style="dim")


def device_line(provenance: dict[str, Any]) -> str:
    """Device and versions."""
    parts = [provenance["device"]]
    if "driver" in provenance:
        parts += [f"driver {provenance['driver']}", f"CUDA {provenance['cuda']}", f"NVRTC {provenance['nvrtc']}"]
    else:
        parts.append(f"{provenance['threads']} threads")
    return ", ".join([*parts, f"torch {provenance['torch']}", f"mxsim {provenance['mxsim']}"])


def time_text(us: float) -> str:
    """In microseconds or milliseconds."""
    return f"{us:.1f} us" if us < 1000 else f"{us / 1e3:.3f} ms" if us < 1e5 else f"{us / 1e3:.0f} ms"


def rate_text(bytes_per_s: float) -> str:
    """In TB/s or GB/s."""
    return f"{bytes_per_s / 1e12:.3f} TB/s" if bytes_per_s >= 1e11 else f"{bytes_per_s / 1e9:.2f} GB/s"


def flops_text(per_s: float) -> str:
    """In TFLOP/s, or in what is a thousandth or a millionth of it."""
    factor, unit = next(((f, u) for f, u in ((1e12, "T"), (1e9, "G")) if per_s >= f), (1e6, "M"))
    return f"{per_s / factor:.{1 if per_s / factor >= 10 else 2}f} {unit}FLOP/s"


def bounds_text(target: "Target | None", form: str, factor: float = 1.0) -> str:
    """Bound and aim, or nothing."""
    return "" if target is None else ", ".join(form.format(factor * x) for x in (target.bound, target.aim))


def verdict_text(figure: Any) -> str:
    """How a figure stands to its target, or nothing."""
    return "" if figure.verdict is None else figure.verdict.value
