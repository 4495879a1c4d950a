"""Requests to stop that arrive as signals. A handler only notes them; ranks act on them together, by agreement."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: Signals that ask a run to stop: a batch system's and people's.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopFlag:
    """Whether this process was asked to stop, and by which signal.

    Setting it is idempotent: the first request is kept, later ones change nothing.
    """

    def __init__(self) -> None:
        self._requested: str | None = None
        self._interrupts = 0

    @property
    def requested(self) -> str | None:
        """Name of the first signal, ``"SIGTERM"``, ``"SIGUSR1"`` or ``"SIGINT"``; None: go on."""
        return self._requested

    def request(self, name: str) -> None:
        """Ask for a stop; the first request stays."""
        if self._requested is None:
            self._requested = name

    @contextmanager
    def catching(self, *, second_interrupt: bool = False) -> Iterator[StopFlag]:
        """Note stop signals while open; the former handlers come back afterwards.

        Python allows handlers in the main thread only; elsewhere this does nothing. With `second_interrupt` a
        second Ctrl-C raises `KeyboardInterrupt`, for a process that nobody else can end.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def note(number: int, _frame: FrameType | None) -> None:
            self.request(signal.Signals(number).name)
            if number == signal.SIGINT:
                self._interrupts += 1
                if second_interrupt and self._interrupts > 1:
                    raise KeyboardInterrupt

        former = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
