"""Splitting the time of one iteration into phases, without a gap and without an overlap."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Gives all time between `start` and the last `lap` to named phases, in milliseconds.

    ``lap(name)`` ends a phase: what passed since the lap before belongs to `name`, added to what it has. On the CPU
    the clock is `time.perf_counter`; on CUDA events are recorded on the current stream, and nothing is waited for
    until `phases` is read.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Begin an iteration."""
        self._marks = []
        self.lap("")

    def lap(self, name: str) -> None:
        """End the phase `name`."""
        if self._cuda:
            mark: Any = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append((name, mark))

    def phases(self) -> dict[str, float]:
        """Milliseconds of each phase since `start`; on CUDA this waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        out: dict[str, float] = {}
        for (_, before), (name, mark) in zip(self._marks, self._marks[1:], strict=False):
            taken = before.elapsed_time(mark) if self._cuda else (mark - before) * 1e3
            out[name] = out.get(name, 0.0) + taken
        return out
