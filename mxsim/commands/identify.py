"""`mxsim identify`: whose rules made the bytes of a file."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mxsim.analysis.identify import Comparison, Identification, identify
from mxsim.analysis.profile_catalog import PROFILES
from mxsim.analysis.telling_apart import Bytes, Distinction
from mxsim.analysis.tensor_files import TensorFileError, open_tensors
from mxsim.commands.bad_input import BadInput, choose
from mxsim.commands.tables import Column, print_table

NO_PROFILE_STATUS = 1
_DISTINCTIONS_SHOWN = 10
_FORMATS = {profile.format.name: profile.format for profile in PROFILES}


def identify_file(file: Path, *, names: tuple[str, str, str], fmt: str | None, as_json: bool, console: Console) -> int:
    """Print which profiles reproduce the file's bytes; 0 if one does, else 1.

    Args:
        names: of the inputs, the codes and the scales.

    Raises:
        BadInput: if the file or its arrays cannot be used.
    """
    chosen = None if fmt is None else choose("format", [fmt], _FORMATS)[0]
    inputs, codes, scales = _load(file, names)
    try:
        result = identify(inputs, codes, scales, fmt=chosen)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{file}: {str(error).removeprefix('identify: ')}") from error
    if as_json:
        console.file.write(json.dumps({"file": str(file), **result.to_json()}, indent=2) + "\n")
    else:
        _print(console, result)
    return 0 if result.fits else NO_PROFILE_STATUS


def _load(file: Path, names: tuple[str, str, str]) -> list[np.ndarray]:
    try:
        with open_tensors(file) as tensors:
            by_name = {tensor.name: tensor for tensor in tensors}
            missing = [name for name in names if name not in by_name]
            if missing:
                raise BadInput(f"{file}: has no {', '.join(missing)}, it has {', '.join(by_name)}")
            return [np.array(by_name[name].load()) for name in names]  # copies: the file closes
    except (TensorFileError, TypeError) as error:
        raise BadInput(str(error)) from error


# ---------------------------------------------------------------------------------------------------------- terminal
def _print(console: Console, result: Identification) -> None:
    shape = " x ".join(map(str, result.shape))
    columns = [
        Column("profile", "left"),
        Column("scales"),
        Column("codes"),
        Column("blocks", is_optional=True),
        Column("first difference", "left", is_optional=True),
    ]
    rows = [_row(c) for c in result.comparisons]
    num_fits = len(result.fits)
    verb = "reproduces" if num_fits == 1 else "reproduce"
    verdict = f"{num_fits or 'none'} of {len(rows)} profiles {verb} every byte"
    note = "scales, codes: how many differ. blocks: how many the profile speaks of."
    print_table(console, f"{result.format}, {shape}: {verdict}", columns, rows, note)
    if num_fits:
        _print_fits(console, result)


def _row(c: Comparison) -> list[str]:
    counts = ["=" if n == 0 else f"{n:,}" for n in (c.num_wrong_scales, c.num_wrong_codes)]
    return [c.profile.name, *counts, f"{c.num_blocks:,}", _first(c)]


def _first(c: Comparison) -> str:
    if c.first is None:
        return "" if c.num_blocks else "speaks of no block here"
    d = c.first
    what = "amax" if d.what == "scale" else "element"
    return f"{d.what} {list(d.index)}: {_code(d.given)}, by the profile {_code(d.by_profile)}; {what} {d.value:.9g}"


def _code(x: float) -> str:
    return f"0x{x:02X}" if isinstance(x, int) else f"{x:.9g}"


def _print_fits(console: Console, result: Identification) -> None:
    console.print()
    for group in result.groups:
        for profile in group:
            console.print(f"{profile.name}: {profile.source}", soft_wrap=True)
        if len(group) > 1:
            console.print(f"  ({len(group)} profiles that no block searched tells apart)", style="dim")
    if not result.distinctions:
        return
    console.print()
    console.print(
        "Blocks that would tell the rest apart (the numbers shown, then zeros):", style="bold", soft_wrap=True
    )
    for distinction in result.distinctions[:_DISTINCTIONS_SHOWN]:
        console.print(_distinction(distinction), soft_wrap=True)
    more = len(result.distinctions) - _DISTINCTIONS_SHOWN
    if more > 0:
        console.print(f"and {more} more pairs: see --json", style="dim")


def _distinction(d: Distinction) -> str:
    a, b = d.profiles
    values = ", ".join(f"{x:.9g}" for x in d.values)
    return f"  [{values}]  {a.name}: {_answer(d.first)};  {b.name}: {_answer(d.second)}"


def _answer(answer: Bytes) -> str:
    scale: Any = answer.scale
    shown = "NaN" if isinstance(scale, float) and math.isnan(scale) else _code(scale)
    return f"scale {shown}, codes {' '.join(f'{code:X}' for code in answer.codes)}"
