"""`mxsim inspect --dot`: one dot product of a block-scaled FP8 GEMM, step by step."""

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from mxsim.analysis.dot_trace import DotTrace, Span, Step, trace_dot
from mxsim.analysis.tensor_files import TensorFileError, open_tensors
from mxsim.blocks import FP8_1X128, quantize
from mxsim.commands.bad_input import BadInput
from mxsim.commands.number_text import exact_decimal, percent, short_text
from mxsim.commands.tables import Column, print_sections
from mxsim.formats.inputs import as_float


def inspect_dot(files: tuple[Path, Path], *, row: int, column: int, as_json: bool, console: Console) -> None:
    """Print how Hopper adds up the dot product of a row of each file's matrix (or of its vectors), both as FP8_1X128.

    Raises:
        BadInput: if a file cannot be read, holds no such row, or the rows cannot be multiplied.
    """
    a, b = _row_of(files[0], row, "--row"), _row_of(files[1], column, "--column")
    if a.shape != b.shape:
        raise BadInput(f"{files[0]} has rows of {a.size} elements and {files[1]} of {b.size}, needed as many")
    trace = trace_dot(quantize(a[None], FP8_1X128), quantize(b[None], FP8_1X128))
    sources = sum((Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)), Fraction(0))
    if as_json:
        console.file.write(json.dumps(_document(trace, sources), indent=2) + "\n")
        return
    _print(console, trace, sources)


def _row_of(file: Path, index: int, option: str) -> np.ndarray:
    try:
        with open_tensors(file) as tensors:
            stored = tensors[0]
            if len(tensors) > 1:
                raise BadInput(f"{file}: holds {len(tensors)} tensors, needed one")
            if stored.problem is not None:
                raise BadInput(f"{file}: {stored.problem}")
            if len(stored.shape) not in (1, 2) or stored.size == 0:
                raise BadInput(f"{file}: has shape {stored.shape}, needed a vector or a matrix that is not empty")
            rows = stored.shape[0] if len(stored.shape) == 2 else 1
            if not 0 <= index < rows:
                raise BadInput(f"{option} is {index}, but {file} has {rows} rows, counted from 0")
            array = stored.load()
            values: np.ndarray = np.array(array[index] if array.ndim == 2 else array)
    except TensorFileError as error:
        raise BadInput(str(error)) from error
    values = as_float(values, caller="inspect", name=str(file)).astype(np.float64)
    if not np.isfinite(values).all():
        raise BadInput(f"{file}: row {index} holds NaN or infinities, needed finite numbers")
    return values


# ---------------------------------------------------------------------------------------------------------- terminal
def _print(console: Console, trace: DotTrace, sources: Fraction) -> None:
    depth = trace.spans[-1].steps[-1].stop
    a = trace.accumulator
    console.print(f"Dot product of {depth} elements, both operands FP8_1X128, as {a} adds it up", style="bold")
    console.print(
        f"Each step adds {a.products_per_step} products to c. Terms are cut to multiples of q = 2^(E - "
        f"{a.fraction_bits}), their sum to {a.fraction_bits} fraction bits.",
        style="dim",
    )
    console.print()
    columns = [
        Column("elements", "left"),
        Column("E"),
        Column("q"),
        Column("products"),
        Column("cut / gone"),
        Column("lost in terms"),
        Column("lost in sum"),
        Column("c"),
    ]
    sections = [(_heading(i, span), [_cells(step) for step in span.steps]) for i, span in enumerate(trace.spans)]
    note = "cut / gone: how many of the non-zero products lost bits, and how many of these all of them."
    print_sections(console, columns, sections, note)
    _print_summary(console, trace, sources)


def _heading(index: int, span: Span) -> Text:
    scales = " * ".join(short_text(x, 10) for x in (span.scale_a, span.scale_b))
    text = Text(f"block {index}", style="bold")
    text.append(
        f": d = {short_text(span.d, 16)}, scales {scales}, float32 sum {short_text(span.sum_after, 16)}", "none"
    )
    return text


def _cells(step: Step) -> list[str]:
    return [
        f"{step.start}-{step.stop - 1}",
        "-" if step.exponent is None else str(step.exponent),
        short_text(step.quantum, 9),
        short_text(step.products, 13),
        f"{step.num_cut} / {step.num_vanished} of {step.num_products}",
        short_text(step.lost_in_terms, 12),
        short_text(step.lost_in_sum, 12),
        short_text(step.c_after, 13),
    ]


def _print_summary(console: Console, trace: DotTrace, sources: Fraction) -> None:
    steps = sum((span.lost for span in trace.spans), Fraction(0))
    if not math.isfinite(trace.result):
        console.print(f"\nresult  {short_text(trace.result)}: the float32 sum overflowed")
        return
    result = Fraction(trace.result)
    rows = [
        ("result", short_text(trace.result, 20), ""),
        ("exact, same codes", short_text(trace.exact, 20), f"the result is off by {_share(result, trace.exact)}"),
        ("exact, the sources", short_text(sources, 20), f"the codes are off by {_share(trace.exact, sources)}"),
        ("lost in the steps", short_text(steps, 20), ""),
        ("lost in promotion", short_text(trace.exact - steps - result, 20), ""),
    ]
    console.print()
    for name, number, note in rows:
        console.print(f"{name:<18}  {number:<20}  {note}".rstrip(), soft_wrap=True)


def _share(x: Fraction, reference: Fraction) -> str:
    return percent(abs((x - reference) / reference)) if reference else short_text(x - reference)


# -------------------------------------------------------------------------------------------------------------- JSON
def _document(trace: DotTrace, sources: Fraction) -> dict[str, Any]:
    return {
        "accumulator": trace.accumulator.name,
        "result": exact_decimal(trace.result),
        "exact": exact_decimal(trace.exact),
        "exact_of_sources": exact_decimal(sources),
        "spans": [
            {
                "scale_a": exact_decimal(span.scale_a),
                "scale_b": exact_decimal(span.scale_b),
                "d": exact_decimal(span.d),
                "sum_after": exact_decimal(span.sum_after),
                "steps": [_step_record(step) for step in span.steps],
            }
            for span in trace.spans
        ],
    }


def _step_record(step: Step) -> dict[str, Any]:
    exact = {name: exact_decimal(getattr(step, name)) for name in _EXACT_FIELDS}
    return {
        "start": step.start,
        "stop": step.stop,
        "exponent": step.exponent,
        "quantum": None if step.quantum is None else exact_decimal(step.quantum),
        "num_products": step.num_products,
        "num_cut": step.num_cut,
        "num_vanished": step.num_vanished,
        **exact,
    }


_EXACT_FIELDS = ("c_before", "products", "lost_in_terms", "lost_in_sum", "c_after")
