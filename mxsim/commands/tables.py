"""Terminal tables: one look, and columns that give way on a narrow terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Column:
    """A column; of the optional ones the last is left out first where the table is too wide."""

    header: str
    justify: Literal["left", "center", "right"] = "right"
    is_optional: bool = False


def print_table(
    console: Console, title: str, columns: Sequence[Column], rows: Iterable[Sequence[str | Text]], note: str = ""
) -> None:
    """Print a title, the table, and a note beneath it."""
    console.print()
    console.print(title, style="bold", soft_wrap=True)
    console.print(fitted_table(console, columns, list(rows)))
    if note:
        console.print(note, style="dim")


def fitted_table(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> Table:
    """The table with wide gaps, else narrow ones, else without optional columns, whichever first fits the console."""
    shown = list(range(len(columns)))
    unlimited = console.options.update(max_width=10_000)
    for gap in (2, 1):
        table = _table(columns, rows, shown, gap)
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            return table
    for i in reversed(range(len(columns))):
        if columns[i].is_optional:
            shown.remove(i)
            table = _table(columns, rows, shown, gap)
            if Measurement.get(console, unlimited, table).maximum <= console.width:
                break
    return table


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], shown: Sequence[int], gap: int) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", pad_edge=False)
    for i in shown:
        table.add_column(columns[i].header, justify=columns[i].justify, no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table


def print_sections(
    console: Console, columns: Sequence[Column], sections: Sequence[tuple[Text, Sequence[Sequence[str]]]], note: str
) -> None:
    """One table in sections, each under a heading as wide as it needs; the columns keep their places throughout."""
    cells = [[column.header for column in columns], *(row for _, rows in sections for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    shown = list(range(len(columns)))
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= console.width else 1
    for i in reversed(range(len(columns))):
        if columns[i].is_optional and sum(widths[j] + gap for j in shown) - gap > console.width:
            shown.remove(i)

    def line(row: Sequence[str]) -> str:
        aligned = (row[i].ljust(widths[i]) if columns[i].justify == "left" else row[i].rjust(widths[i]) for i in shown)
        return (" " * gap).join(aligned).rstrip()

    console.print(line(cells[0]), style="dim", soft_wrap=True)
    for heading, rows in sections:
        console.print()
        console.print(heading, soft_wrap=True)
        for row in rows:
            console.print(line(row), soft_wrap=True)
    if note:
        console.print()
        console.print(note, style="dim")
