"""`mxsim bench ep`: time of the dispatch and of the layer over several processes as tables, or JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mxsim.commands.bad_input import BadInput
from mxsim.commands.bench import (
    WRONG_STATUS,
    bounds_text,
    check_file,
    device_line,
    print_count,
    print_notes,
    run_benchmark,
    time_text,
    verdict_text,
)
from mxsim.commands.tables import Column, print_table

if TYPE_CHECKING:
    from mxsim.bench.ep import EpReport
    from mxsim.bench.ep.report import Dispatched, LayerStep
    from mxsim.bench.moe.figures import Figure


def bench_ep(
    device: str | None,
    num_ranks: int | None,
    *,
    as_json: bool,
    file: Path | None,
    console: Console,
    progress_console: Console,
) -> int:
    """Run, print the tables or the JSON, and return the exit status: 1 if a process failed or bits differ.

    device: None: CUDA where there are two devices. file: where the JSON goes, beside the tables.

    Raises:
        BadInput: if an argument cannot be used.
    """
    check_file(file, as_json=as_json)
    try:
        import torch

        from mxsim.bench import ep
    except ImportError as error:
        raise BadInput(f"bench ep needs torch ({error}); install mxsim[train] or torch") from error

    where = device or ("cuda" if torch.cuda.device_count() > 1 else "cpu")
    try:
        return run_benchmark(
            lambda progress: ep.run(where, num_ranks=num_ranks, progress=progress),
            lambda report: _print(console, report),
            as_json=as_json,
            file=file,
            console=console,
            progress_console=progress_console,
        )
    except RuntimeError as error:
        progress_console.print(f"mxsim: {error}", markup=False, soft_wrap=True)
        return WRONG_STATUS


# -------------------------------------------------------------------------------------------------------------- tables
def _print(console: Console, report: "EpReport") -> None:
    console.print(f"{device_line(report.provenance)}, {report.provenance['backend']}", style="bold", soft_wrap=True)
    console.print(f"{report.num_ranks} ranks; {report.shape}", soft_wrap=True)
    if report.ok:
        how = "bit by bit (BF16: within 2**-7)"
        console.print(f"Results and gradients of a small layer compared first with those of one process, {how}.")
    if report.dispatches:
        _print_dispatches(console, report)
        _print_steps(console, report.steps)
        _print_figures(console, report.figures)
    console.print()
    if verdicts := report.verdicts():
        print_count(console, verdicts)
    print_notes(console, report)


def _print_dispatches(console: Console, report: "EpReport") -> None:
    names = next((list(d.parts) for d in report.dispatches if d.parts), [])

    def cells(d: "Dispatched") -> list[str]:
        return [
            str(d.tokens),
            d.recipe,
            str(d.num_chunks),
            str(d.row_bytes),
            f"{d.bytes_to_others / 1e6:.1f}",
            *(f"{d.parts[name] / 1e3:.3f}" if d.parts else "" for name in names),
            f"{d.us / 1e3:.3f}",
            f"{100 * (d.max_us - d.min_us) / d.us:.1f} %",
            "" if d.is_queue_full else "waited for Python",
        ]

    plans = ", ".join(f"{time_text(us)} at {tokens}" for tokens, us in report.plan_us.items())
    print_table(
        console,
        "Forward dispatch, the slowest rank, ms",
        [
            Column("tokens"),
            Column("", "left"),
            Column("chunks"),
            Column("B/row"),
            Column("MB sent"),
            *(Column(name) for name in names),
            Column("whole"),
            Column("spread", is_optional=True),
            Column("", "left", is_optional=True),
        ],
        [cells(d) for d in report.dispatches],
        f"MB sent: rows to other ranks, by count. Not in the whole: counts exchanged and waited for, {plans} tokens.",
    )


def _print_steps(console: Console, steps: "Sequence[LayerStep]") -> None:
    has_memory = any(step.peak_in_all for step in steps)
    rows = [
        [
            str(s.tokens),
            s.recipe,
            time_text(s.us),
            f"{100 * (s.max_us - s.min_us) / s.us:.1f} %",
            *([f"{n / 1e9:.2f}" for n in (s.kept_bytes, s.peak_bytes, s.peak_in_all)] if has_memory else []),
        ]
        for s in steps
    ]
    memory = [Column("GB kept for backward"), Column("GB peak"), Column("with weights")] if has_memory else []
    print_table(
        console,
        "Whole layer, forward + backward, wall clock of the slowest rank",
        [Column("tokens"), Column("", "left"), Column("time"), Column("spread"), *memory],
        rows,
        "FP8 weights are made before. Peak: above weights, their FP8 copies and the input." if has_memory else "",
    )


def _print_figures(console: Console, figures: "Sequence[Figure]") -> None:
    has_targets = any(figure.target for figure in figures)
    targets = [Column("at least, aim"), Column("", "left")] if has_targets else []
    rows = [
        [f.name, f"{f.value:.3f}", *([bounds_text(f.target, "{:g}"), verdict_text(f)] if has_targets else [])]
        for f in figures
    ]
    print_table(console, "Figures", [Column("", "left"), Column("measured"), *targets], rows)
