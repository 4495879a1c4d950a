"""Run plugin ``wall-time``: stops before a limit, with a checkpoint, to be resumed. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mtb_core import Control, RunInfo, hookimpl

from .options import WallTimeOptions, seconds


class WallTime:
    """Asks to stop when less time is left than the margin and two of the longest steps.

    Two, because a request that is made after one step is acted on after the next one. A step here is the time from one
    to the next, saving and evaluation included. Each rank looks at its own clock; the first one to ask is enough.
    """

    def __init__(self, options: WallTimeOptions) -> None:
        assert options.limit is not None
        self._limit = seconds(options.limit, "wall-time.limit")
        self._margin = seconds(options.margin, "wall-time.margin")
        self._control: Control | None = None
        self._started = 0.0
        self._last: float | None = None
        self._longest = 0.0

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """The clock has run since ``mtb`` began, restarts of the ranks included."""
        self._control, self._started = info.control, info.started
        self._look()

    @hookimpl
    def mtb_step_recorded(self) -> None:
        """Look at the clock."""
        now = time.monotonic()
        if self._last is not None:  # the first step is longer than others, and does not come again
            self._longest = max(self._longest, now - self._last)
        self._last = now
        self._look()

    @hookimpl
    def mtb_result(self) -> Mapping[str, Any]:
        """Its measures in seconds, for the result."""
        return {"limit_s": self._limit, "margin_s": self._margin, "longest_step_s": self._longest}

    def _look(self) -> None:
        elapsed = time.monotonic() - self._started
        if elapsed >= self._limit - self._margin - 2 * self._longest and self._control is not None:
            self._control.stop(
                f"wall-time: {elapsed:.0f} s of {self._limit:.0f} s are over, with a margin of {self._margin:.0f} s"
            )
