"""Terminal tables: one look, and columns that give way on a narrow terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

_MIN_TEXT = 12  # width of a header or of a text column that gives way


@dataclass(frozen=True)
class Column:
    """A column; of the optional ones the last is left out first where the table is too wide."""

    header: str
    justify: Literal["left", "center", "right"] = "right"
    is_optional: bool = False


def print_table(
    console: Console, title: str, columns: Sequence[Column], rows: Iterable[Sequence[str | Text]], note: str = ""
) -> None:
    """Print a title, the table, and a note beneath it. Where no table fits, the terminal wraps its lines."""
    console.print()
    console.print(title, style="bold", soft_wrap=True)
    table = fitted_table(console, columns, list(rows))
    options = console.options.update(max_width=max(console.width, _width_of(console, table)))
    console.print(Segments(console.render(table, options)), soft_wrap=True, end="")
    if note:
        console.print(note, style="dim")


def fitted_table(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> Table:
    """The first of these that fits the console, or the last, so that nothing is cut.

    Wide gaps; narrow ones; without the last optional column, and so on; headers of several lines, and text, the widest
    column first; headers of as many lines as they have words.
    """
    cells = [list(row) for row in rows]
    widths = [max([1, *(_width(row[i]) for row in cells)]) for i in range(len(columns))]
    shown = list(range(len(columns)))

    def table(gap: int, header_width: int) -> Table:
        return _table(columns, cells, shown, gap, [max(width, header_width) for width in widths])

    def excess(table: Table) -> int:
        return _width_of(console, table) - console.width

    found = table(2, console.width)
    if excess(found) > 0:
        found = table(1, console.width)
    for i in reversed(range(len(columns))):
        if columns[i].is_optional and excess(found) > 0:
            shown.remove(i)
            found = table(1, console.width)
    texts = sorted((i for i in shown if columns[i].justify == "left"), key=lambda i: -widths[i])
    for header_width in (_MIN_TEXT, 1):
        if excess(found) <= 0:
            break
        for i in texts:
            if (num_lacking := excess(table(1, header_width))) > 0:
                widths[i] = max(widths[i] - num_lacking, _MIN_TEXT)
                for row, source in zip(cells, rows, strict=True):
                    row[i] = _in_lines(source[i], widths[i])
        found = table(1, header_width)
    return found


def _width_of(console: Console, table: Table) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _in_lines(cell: str | Text, width: int) -> str | Text:
    """Words stay whole, so that names can be copied."""
    if isinstance(cell, Text):
        return cell
    return "\n".join(wrap(cell, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def _width(cell: str | Text) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)


def _table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str | Text]],
    shown: Sequence[int],
    gap: int,
    header_widths: Sequence[int],
) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", pad_edge=False)
    for i in shown:
        header = "\n".join(wrap(columns[i].header, header_widths[i], break_long_words=False))
        table.add_column(header, justify=columns[i].justify, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell := row[i], str) else cell for i in shown))  # no markup
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
