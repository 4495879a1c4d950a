"""Requests to stop that arrive as signals. A handler only notes them; ranks act on them together, by agreement."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mtb_core.api.errors import RunFailed

#: Signals that ask a run to stop: a batch system's and people's.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
#: SIGTERM again within so many seconds is the same request: batch systems signal a process, and its group as well.
SAME_REQUEST_S = 2.0


class Insistence:
    """Tells a second SIGTERM from one that was delivered twice."""

    def __init__(self) -> None:
        self._first: float | None = None

    def again(self) -> bool:
        """Note a SIGTERM; whether it asks for more than the first one did."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return now - self._first >= SAME_REQUEST_S


def _nobody(_held: bool) -> None:
    """Nobody would end this process for not stopping."""


class StopFlag:
    """The first stop signal of this process, if there was one.

    Setting it is idempotent: the first request is kept, later ones change nothing. Whoever insists on a stop may have
    this process ended, but not while it is `holding`, nor once it has heeded the request.

    Args:
        on_hold: called with True when this process must not be ended for not stopping, with False when it may be.
    """

    def __init__(self, on_hold: Callable[[bool], None] = _nobody) -> None:
        self._requested: str | None = None
        self._interrupts = 0
        self._holds = 0
        self._on_hold = on_hold
        self._insistence = Insistence()

    @property
    def requested(self) -> str | None:
        """Name of the first signal, ``"SIGTERM"``, ``"SIGUSR1"`` or ``"SIGINT"``; None: go on."""
        return self._requested

    def request(self, name: str) -> None:
        """Ask for a stop; the first request stays."""
        if self._requested is None:
            self._requested = name

    @contextmanager
    def holding(self) -> Iterator[None]:
        """While open, something is done that ends by itself and must not be cut short: a checkpoint is saved."""
        self.heed()
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._on_hold(False)

    def heed(self) -> None:
        """The ranks have agreed to stop: from here on they leave by themselves."""
        self._holds += 1
        if self._holds == 1:
            self._on_hold(True)

    @contextmanager
    def catching(self, *, second_interrupt: bool = False) -> Iterator[StopFlag]:
        """Note stop signals while open; the former handlers come back afterwards.

        Python allows handlers in the main thread only; elsewhere this does nothing. With `second_interrupt`,
        for a process that nobody else can end, a second Ctrl-C raises `KeyboardInterrupt`, and a second SIGTERM
        `RunFailed`, unless the process is holding or has heeded the first.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.request(signal.Signals(number).name)
            if number == signal.SIGINT:
                self._interrupts += 1
                if second_interrupt and self._interrupts > 1:
                    raise KeyboardInterrupt
            if number == signal.SIGTERM and self._insistence.again() and second_interrupt and not self._holds:
                traceback.print_stack(frame)
                raise RunFailed("It had not stopped when a second SIGTERM came, and was ended without a checkpoint.")

        former = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
