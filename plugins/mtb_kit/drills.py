"""Run plugins that make something happen at a chosen place of a run."""

from __future__ import annotations

import os

from mtb_core.api.hooks import hookimpl
from mtb_core.api.records import RunInfo, StepRecord


class SignalAt:
    """Sends the signal `number` to its own process, on rank `rank` only, `times` times, when `step` was recorded."""

    def __init__(self, rank: int, step: int, number: int, times: int = 1) -> None:
        self._where, self._number, self._times, self._rank = (rank, step), number, times, -1

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """Learn which rank this is."""
        self._rank = info.ctx.rank

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        """Send, if this is the place."""
        if (self._rank, record.global_step) == self._where:
            for _ in range(self._times):
                os.kill(os.getpid(), self._number)
