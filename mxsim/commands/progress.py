"""The progress bar of the commands: on stderr, gone when the work is done."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console


class Update(Protocol):
    """Moves the bar to done of to_do; text stands beside a bar that has no fixed description."""

    def __call__(self, done: int, to_do: int, text: str = "") -> None: ...


@contextmanager
def progress_bar(console: Console, description: str | None = None) -> Iterator[Update | None]:
    """A bar on the console, or None where it is no terminal.

    With a description: it, the bar and the time that remains. Without: the bar, the time so far and each update's text.
    """
    if not console.is_terminal:
        yield None
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    text_column, bar_columns = TextColumn("{task.description}"), (BarColumn(), TaskProgressColumn())
    columns = (
        (*bar_columns, TimeElapsedColumn(), text_column)
        if description is None
        else (text_column, *bar_columns, TimeRemainingColumn())
    )
    # stdout may be a pipe: what is printed to it must not be taken for something to show above the bar.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(description or "", total=None)

        def update(done: int, to_do: int, text: str = "") -> None:
            bar.update(task, completed=done, total=to_do, description=text[:50] if description is None else None)

        yield update
