"""The error that becomes one line on stderr and exit status 2."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class BadInput(Exception):
    """Something that the user gave cannot be used; the message is one line."""


def choose(kind: str, names: Iterable[str], known: Mapping[str, T]) -> list[T]:
    """The known things with the given names, in any letter case, each once.

    Raises:
        BadInput: for a name that is not known; says what is, and which one may be meant.
    """
    by_lower_case = {name.lower(): name for name in known}
    chosen = []
    for name in names:
        if name.lower() not in by_lower_case:
            close = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
            hint = f"; did you mean {by_lower_case[close[0]]}?" if close else ""
            raise BadInput(f"unknown {kind} {name!r}{hint} (known: {', '.join(known)})")
        chosen.append(known[by_lower_case[name.lower()]])
    return list(dict.fromkeys(chosen))


def printable(text: str) -> str:
    """The text with everything escaped that could break a line or steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
