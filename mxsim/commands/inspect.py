"""`mxsim inspect`: one number or one code in every format."""

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from mxsim.analysis.inspection import (
    DETERMINISTIC_ROUNDINGS,
    BlockMaximum,
    InspectedCode,
    RoundedNumber,
    as_block_maximum,
    inspect_code,
    round_number,
)
from mxsim.blocks import BLOCK_FORMATS, BlockFormat
from mxsim.commands.bad_input import BadInput, choose
from mxsim.commands.number_text import (
    InputKind,
    ParsedNumber,
    exact_decimal,
    looks_like_code,
    parse_code,
    parse_number,
    percent,
    short_hex,
    short_text,
)
from mxsim.commands.tables import Column, print_table
from mxsim.formats import FORMATS, FloatFormat, Overflow

_FIELD_STYLES = ("red", "green", "blue")
# One shape of FP8 block says it all for a single number.
_DEFAULT_BLOCK_FORMATS = [fmt for fmt in BLOCK_FORMATS.values() if fmt.name not in ("FP8_128X1", "FP8_128X128")]


def inspect(text: str, *, formats: Sequence[str], kind: InputKind | None, as_json: bool, console: Console) -> None:
    """Print what the chosen formats (none: all) make of the number or code.

    Raises:
        BadInput: if the text is neither, or an unknown format is named.
    """
    elements, blocks = _chosen_formats(formats)
    if kind is InputKind.CODE or (kind is None and looks_like_code(text)):
        report = _code_report(parse_code(text), elements)
        if not as_json:
            _print_code(console, *report)
            return
        code, inspected, too_narrow = report
        result: dict[str, Any] = {
            "code": code,
            "formats": [_code_record(c) for c in inspected],
            "too_narrow": [fmt.name for fmt in too_narrow],
        }
    else:
        number = parse_number(text)
        rounded = [round_number(number.value, fmt) for fmt in elements]
        maxima = [entry for fmt in blocks for entry in as_block_maximum(number.value, fmt)]
        if not as_json:
            _print_number(console, text, number, rounded, maxima)
            return
        result = {
            "input": text,
            "value": exact_decimal(number.value),
            "is_exact": number.is_exact,
            "formats": [_rounded_record(r) for r in rounded],
            "blocks": [_block_record(m) for m in maxima],
        }
    console.file.write(json.dumps(result, indent=2) + "\n")


def _chosen_formats(names: Sequence[str]) -> tuple[list[FloatFormat], list[BlockFormat]]:
    """Element formats, and block formats; naming one brings the other's that belong to it."""
    if not names:
        return list(FORMATS.values()), _DEFAULT_BLOCK_FORMATS
    known: dict[str, FloatFormat | BlockFormat] = {**FORMATS, **BLOCK_FORMATS}
    chosen = choose("format", names, known)
    elements = [fmt if isinstance(fmt, FloatFormat) else fmt.element for fmt in chosen]
    named = [fmt for fmt in chosen if isinstance(fmt, BlockFormat)]
    implied = [b for b in _DEFAULT_BLOCK_FORMATS if b.element in chosen and b not in named]
    return list(dict.fromkeys(elements)), named + implied


# -------------------------------------------------------------------------------------------------------------- code
def _code_report(code: int, elements: Sequence[FloatFormat]) -> tuple[int, list[InspectedCode], list[FloatFormat]]:
    fitting = [fmt for fmt in elements if code < fmt.num_codes]
    if not fitting:
        widest = max(elements, key=lambda fmt: fmt.bits)
        raise BadInput(f"{_hex(code)} has {code.bit_length()} bits, but a code of {widest} has {widest.bits}")
    too_narrow = [fmt for fmt in elements if fmt not in fitting]
    return code, [inspect_code(code, fmt) for fmt in fitting], too_narrow


def _print_code(
    console: Console, code: int, inspected: Sequence[InspectedCode], too_narrow: Sequence[FloatFormat]
) -> None:
    console.print(f"code {_hex(code)} = {code}", style="bold")
    rows = [[c.format.name, _bits(c), c.kind.value, short_text(c.value, 14), _product(c)] for c in inspected]
    note = ""
    if too_narrow:
        widths = ", ".join(f"{fmt} ({fmt.bits})" for fmt in too_narrow)
        note = f"Has {code.bit_length()} bits, too many for a code of {widths}."
    columns = [
        Column("format", "left"),
        Column("bits", "left"),
        Column("is", "left"),
        Column("value"),
        Column("= significand * 2^e", is_optional=True),
    ]
    print_table(console, "As a code: sign, exponent and mantissa bits", columns, rows, note)
    rows = [
        [c.format.name, *(short_text(x, 16) for x in (c.below, c.value, c.above, c.ulp))]
        for c in inspected
        if not math.isnan(c.value)
    ]
    if rows:
        columns = [Column("format", "left"), Column("below"), Column("value"), Column("above"), Column("ulp")]
        print_table(console, "Neighbours", columns, rows)


def _code_record(c: InspectedCode) -> dict[str, Any]:
    sign, exponent, mantissa = c.fields
    return {
        "format": c.format.name,
        "code": c.code,
        "kind": c.kind.value,
        "sign_bits": sign,
        "exponent_bits": exponent,
        "mantissa_bits": mantissa,
        "value": exact_decimal(c.value),
        "significand": c.significand,
        "exponent": c.exponent,
        "below": _decimal(c.below),
        "above": _decimal(c.above),
        "ulp": _decimal(c.ulp),
    }


# ------------------------------------------------------------------------------------------------------------ number
def _print_number(
    console: Console,
    text: str,
    number: ParsedNumber,
    rounded: Sequence[RoundedNumber],
    maxima: Sequence[BlockMaximum],
) -> None:
    x = number.value
    _print_headline(console, text, number)
    rows = [_nearest_row(r) for r in rounded]
    columns = [
        Column("format", "left"),
        Column("code"),
        Column("bits", "left"),
        Column("value"),
        Column("error"),
        Column("= significand * 2^e", is_optional=True),
    ]
    print_table(console, "Nearest value (ties to even, saturating): sign, exponent and mantissa bits", columns, rows)
    if math.isfinite(x):
        _print_roundings(console, rounded)
    _print_overflows(console, x, rounded)
    if maxima:
        _print_blocks(console, x, maxima)


def _print_headline(console: Console, text: str, number: ParsedNumber) -> None:
    x = number.value
    decimal = exact_decimal(x)
    if not math.isfinite(x):
        line = decimal if number.is_exact else f"{text} is beyond float64: read as {decimal}"
    elif number.is_exact:
        shown = decimal if len(decimal) <= 60 else short_text(x, 20)
        line = " = ".join(dict.fromkeys([text, shown, short_hex(x)]))
    else:
        shown = decimal if len(decimal) <= 60 else f"{short_text(x, 14)} = {short_hex(x)}"
        line = f"{text} is no float64: read as the nearest, {shown}"
    console.print(line, style="bold", soft_wrap=True)


def _nearest_row(r: RoundedNumber) -> list[str | Text]:
    c = r.nearest
    if c is None:
        return [r.format.name, "-", "no code", "-", "-", "-"]
    code = f"0x{c.code:0{-(-r.format.bits // 4)}x}"
    return [r.format.name, code, _bits(c), short_text(c.value, 13), percent(r.relative_error), _product(c)]


def _print_roundings(console: Console, rounded: Sequence[RoundedNumber]) -> None:
    rows = []
    for r in rounded:
        if r.nearest is None or math.isnan(r.nearest.value):
            continue
        arrows = [_ARROWS[_sign(r.outcomes[rounding][Overflow.SATURATE], r)] for rounding in DETERMINISTIC_ROUNDINGS]
        neighbours = [short_text(x, 12) for x in (r.below, r.above)]
        rows.append([r.format.name, *neighbours, *arrows, _stochastic(r), short_text(r.nearest.ulp, 9)])
    columns = [
        Column("format", "left"),
        Column("below"),
        Column("above"),
        *(Column(name, "center") for name in ("even", "away", "zero", "up", "down")),
        Column("stochastic", "left"),
        Column("ulp"),
    ]
    note = (
        "↓ takes the value below, ↑ the one above, = is exact. even, away: to nearest, ties to even, ties away from 0."
    )
    print_table(console, "Neighbours, and which of them each rounding takes (saturating)", columns, rows, note)


_ARROWS = {-1: "↓", 0: "=", 1: "↑"}


def _sign(outcome: float | None, r: RoundedNumber) -> int:
    """Whether an outcome lies below, at or above the number."""
    assert outcome is not None
    return (outcome > r.number) - (outcome < r.number)


def _stochastic(r: RoundedNumber) -> str:
    if r.error == 0:
        return "="
    negative = r.number < 0
    away, back = ("↓", "↑") if negative else ("↑", "↓")
    if r.away_share is None:  # below the smallest value of a format without zero
        return away
    return back if abs(r.number) > r.format.max_finite else f"{away} {percent(r.away_share)}"


def _print_overflows(console: Console, x: float, rounded: Sequence[RoundedNumber]) -> None:
    """Where the overflow modes differ, or one of them is refused and matters."""
    rows = []
    for r in rounded:
        if math.isnan(x) or r.nearest is None or abs(x) <= r.format.max_finite or math.isnan(r.nearest.value):
            continue
        outcomes = [r.outcomes[rounding][Overflow.TO_NONFINITE] for rounding in DETERMINISTIC_ROUNDINGS]
        texts = ["refused" if value is None else short_text(value, 10) for value in outcomes]
        rows.append([r.format.name, short_text(r.nearest.value, 12), *texts])
    if not rows:
        return
    columns = [Column("format", "left"), Column("SATURATE")]
    columns += [Column(name) for name in ("TO_NONFINITE: even", "away", "zero", "up", "down")]
    print_table(console, "Beyond the largest value: what the overflow modes give", columns, rows)


def _print_blocks(console: Console, x: float, maxima: Sequence[BlockMaximum]) -> None:
    rows = []
    for m in maxima:
        scale = f"2^{m.scale_exponent}" if m.scale_exponent is not None else short_text(m.scale, 7)
        code = f"0x{m.code:0{-(-m.format.element.bits // 4)}x}"
        rules = " ".join(rule.name for rule in m.rules) or "its own"
        value = short_text(m.value, 11)
        rows.append(
            [
                m.format.name,
                rules,
                scale,
                short_text(m.scaled, 9),
                code,
                value,
                percent(m.relative_error),
                short_text(m.element, 9),
            ]
        )
    columns = [
        Column("format", "left"),
        Column("scale rule", "left"),
        Column("scale"),
        Column("x / scale"),
        Column("code"),
        Column("value"),
        Column("error"),
        Column("element", is_optional=True),
    ]
    title = f"A block (NVFP4: a tensor) with largest element x = {short_text(x, 14)}"
    print_table(console, title, columns, rows)


def _rounded_record(r: RoundedNumber) -> dict[str, Any]:
    outcomes = {
        rounding.name: {overflow.name: _decimal(value) for overflow, value in by_overflow.items()}
        for rounding, by_overflow in r.outcomes.items()
    }
    return {
        "format": r.format.name,
        "nearest": None if r.nearest is None else _code_record(r.nearest),
        "error": None if r.error is None else exact_decimal(r.error),
        "relative_error": None if r.relative_error is None else float(r.relative_error),
        "below": _decimal(r.below),
        "above": _decimal(r.above),
        "stochastic_away_probability": None if r.away_share is None else min(1.0, float(r.away_share)),
        "outcomes": outcomes,
    }


def _block_record(m: BlockMaximum) -> dict[str, Any]:
    return {
        "format": m.format.name,
        "scale_rules": [rule.name for rule in m.rules],
        "scale": _decimal(m.scale),
        "scale_code": m.scale_code,
        "scale_exponent": m.scale_exponent,
        "scaled": None if m.scaled is None else float(m.scaled),
        "code": m.code,
        "element": _decimal(m.element),
        "value": _decimal(m.value),
        "relative_error": None if m.relative_error is None else float(m.relative_error),
    }


# ------------------------------------------------------------------------------------------------------------- cells
def _bits(c: InspectedCode) -> Text:
    fields = [(bits, style) for bits, style in zip(c.fields, _FIELD_STYLES, strict=True) if bits]
    return Text(" ").join(Text(bits, style=style) for bits, style in fields)


def _product(c: InspectedCode) -> str:
    return "-" if c.significand is None else f"{c.significand} * 2^{c.exponent}"


def _hex(code: int) -> str:
    return f"{code:#x}"


def _decimal(x: float | None) -> str | None:
    return None if x is None else exact_decimal(x)
