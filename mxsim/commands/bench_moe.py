"""`mxsim bench moe`: time and memory of the expert layer as tables, or JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from mxsim.commands.bad_input import BadInput
from mxsim.commands.bench import (
    bounds_text,
    check_file,
    device_line,
    flops_text,
    print_count,
    print_notes,
    rate_text,
    run_benchmark,
    time_text,
    verdict_text,
)
from mxsim.commands.tables import Column, print_table
from mxsim.commands.words import counted

if TYPE_CHECKING:
    from mxsim.bench.moe import MoeReport
    from mxsim.bench.moe.figures import Figure
    from mxsim.bench.moe.memory import Peak
    from mxsim.bench.moe.report import PartTime, RoutingReport
    from mxsim.bench.timing import Timing

_RECIPES = ("BF16", "FP8", "MXFP4")


def bench_moe(
    device: str | None, *, as_json: bool, file: Path | None, console: Console, progress_console: Console
) -> int:
    """Run, print the tables or the JSON, and return the exit status: 1 if something failed or is not near BF16.

    device: None: CUDA where there is a device. file: where the JSON goes, beside the tables.

    Raises:
        BadInput: if an argument cannot be used.
    """
    check_file(file, as_json=as_json)
    try:
        import torch

        from mxsim.bench import moe
    except ImportError as error:
        raise BadInput(f"bench moe needs torch ({error}); install mxsim[train] or torch") from error

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return run_benchmark(
        lambda progress: moe.run(where, progress=progress),
        lambda report: _print(console, report),
        as_json=as_json,
        file=file,
        console=console,
        progress_console=progress_console,
    )


# -------------------------------------------------------------------------------------------------------------- tables
def _print(console: Console, report: "MoeReport") -> None:
    console.print(device_line(report.provenance), style="bold", soft_wrap=True)
    console.print(str(report.shape), soft_wrap=True)
    errors = [(check, max(check.errors.values())) for r in report.routings for check in r.checks]
    if errors:
        worst = {check.recipe: max(e for c, e in errors if c.recipe == check.recipe) for check, _ in errors}
        near = ", ".join(f"{recipe} {worst[recipe]:.3f}" for recipe in _RECIPES if recipe in worst)
        console.print(f"Results and gradients compared first with BF16's, largest relative error: {near}.")
    for routing in report.routings:
        _print_steps(console, routing)
    for routing in report.routings:
        if routing.parts:
            _print_sums(console, routing)
    _print_parts(console, [routing for routing in report.routings if routing.parts])
    if report.dense:
        _print_dense(console, report.dense)
    _print_memory(console, report)
    _print_figures(console, report.figures)
    console.print()
    if verdicts := list(report.verdicts()):
        print_count(console, verdicts)
    print_notes(console, report)


def _print_steps(console: Console, found: "RoutingReport") -> None:
    if not found.steps:
        return
    on_device = any(step.host_us is not None for step in found.steps)
    is_bound = any(step.is_host_bound for step in found.steps)
    rows = [
        [
            step.name,
            time_text(step.timing.us),
            _spread(step.timing),
            *([time_text(step.host_us or 0.0), time_text(step.wall_us or 0.0)] if on_device else []),
            _size(found.saved_bytes()[step.name]) if step.name in found.saved else "",
            "bound by the host" if step.is_host_bound else _waited(step.timing),
        ]
        for step in found.steps
    ]
    description = found.routing.description
    sizes = " to ".join(map(str, dict.fromkeys((min(found.sizes), max(found.sizes)))))
    bound = " Bound by the host: Python takes as long as the device for a step, or longer." if is_bound else ""
    print_table(
        console,
        f"Forward + backward, {found.routing.value} ({sizes} rows an expert)",
        [
            Column("", "left"),
            Column("device" if on_device else "time"),
            Column("spread", is_optional=True),
            *([Column("Python"), Column("step after step")] if on_device else []),
            Column("kept for backward"),
            Column("", "left"),
        ],
        rows,
        f"{description[0].upper()}{description[1:]}.{bound}",
    )


def _print_sums(console: Console, found: "RoutingReport") -> None:
    """A recipe's parts by what they do, beside the whole."""
    sums = {recipe: found.sums(recipe) for recipe in _RECIPES}
    kinds = dict.fromkeys(part.kind for part in found.parts if part.kind.is_in_step)
    whole = {step.name: step.timing.us for step in found.steps}
    rows = [[kind.value, *(time_text(sums[r][kind]) if kind in sums[r] else "" for r in _RECIPES)] for kind in kinds]
    totals = {recipe: sum(sums[recipe].values()) for recipe in _RECIPES}
    rows += [
        ["sum", *(time_text(totals[r]) for r in _RECIPES)],
        ["whole step", *(time_text(whole[r]) if r in whole else "" for r in _RECIPES)],
    ]
    columns = [Column("", "left"), *(Column(recipe) for recipe in _RECIPES)]
    print_table(console, f"The step by parts, each on its own, {found.routing.value}", columns, rows)


def _print_parts(console: Console, found: "Sequence[RoutingReport]") -> None:
    """Every part, a column of times for each routing; rates of the first."""
    if not found:
        return
    columns = [Column("part", "left"), *(Column(f.routing.value) for f in found)]
    rows = [
        [parts[0].name, *(time_text(p.timing.us) for p in parts), *_rates(parts[0]), ", ".join(parts[0].recipes)]
        for parts in zip(*(f.parts for f in found), strict=True)
    ]
    columns += [*_RATES, Column("in the step of", "left", is_optional=True)]
    print_table(console, "Parts", columns, rows, f"Rates, spread: {found[0].routing.value}.")


def _print_dense(console: Console, parts: "Sequence[PartTime]") -> None:
    columns = [Column("", "left"), Column("time"), *_RATES]
    rows = [[part.name, time_text(part.timing.us), *_rates(part)] for part in parts]
    print_table(console, "The same rows as one matrix", columns, rows)


_RATES = (Column("rate"), Column("spread", is_optional=True), Column("", "left", is_optional=True))


def _rates(part: "PartTime") -> list[str]:
    rate = flops_text(1e12 * part.tflop_per_s) if part.flops else rate_text(1e12 * part.tb_per_s)
    remarks = ["in cache"] if part.is_in_cache else []
    return [rate, _spread(part.timing), ", ".join([*remarks, *filter(None, [_waited(part.timing)])])]


def _waited(timing: "Timing") -> str:
    return "" if timing.is_queue_full else "waited for Python"


def _print_memory(console: Console, report: "MoeReport") -> None:
    if not report.peaks:
        return

    def cells(peak: "Peak") -> list[str]:
        return [
            f"{counted(peak.num_layers, 'layer')}, {peak.recipe}",
            *(_size(n) for n in (peak.after_forward, peak.peak, peak.resting, peak.resting + peak.peak)),
        ]

    print_table(
        console,
        "Memory of x + layer(x), forward + backward, gradients accumulating",
        [
            Column("", "left"),
            Column("after forward"),
            Column("peak"),
            Column("weights, gradients"),
            Column("peak in all"),
        ],
        [cells(peak) for peak in report.peaks],
        "After forward and peak: above weights, their FP8 copies, gradients and the input.",
    )


def _print_figures(console: Console, figures: "Sequence[Figure]") -> None:
    has_targets = any(figure.target for figure in figures)
    columns = [
        Column("", "left"),
        Column("measured"),
        *([Column("to reach, aim"), Column("", "left")] if has_targets else []),
    ]
    by_routing: dict[str, list[list[str | Text]]] = {}
    for figure in figures:
        by_routing.setdefault("one dense matrix" if figure.routing is None else figure.routing.value, []).append(
            [
                f"{figure.name} (paper: {figure.paper})" if figure.paper else figure.name,
                f"{figure.value:.3f}",
                *([bounds_text(figure.target, "{:g}"), verdict_text(figure)] if has_targets else []),
            ]
        )
    blank = [""] * (len(columns) - 1)
    rows: list[list[str | Text]] = []
    for routing, found in by_routing.items():
        rows += [["", *blank], [Text(routing, "bold"), *blank], *found]
    print_table(console, "Figures", columns, rows)


def _spread(timing: "Timing") -> str:
    return f"{100 * (timing.max_us - timing.min_us) / timing.us:.1f} %"


def _size(num_bytes: int) -> str:
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.1f} kB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.3f} GB"
