"""Ctrl-C that lets a step end."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """While open, the first SIGINT or SIGTERM is kept in `signal`; the second acts as it did before.

    Only the main thread can have it; elsewhere signals stay as they are.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._keep) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
