"""The run plugin that records: torch.profiler over a few steps of a training, with the phases of each step named.

It is given to one run by `mtb profile run` and is no part of any other: a timed run is never profiled.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from mtb_core import RunInfo, hookimpl, write_json

from .schedule import Schedule
from .traces import memory_timeline, publish_trace, trace_path

#: Operators that are written down, the most expensive ones.
_OPERATORS = 100

_Context = AbstractContextManager[None]


class Recorder:
    """Profiles one trial on one rank and writes ``trace/`` in the run's folder."""

    def __init__(self, plan: Schedule) -> None:
        self._plan = plan
        self._profiler: profile | None = None
        self._range: record_function | None = None

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """Start the profiler; it looks away until its schedule says so."""
        activities = [ProfilerActivity.CPU]
        if info.ctx.device.startswith("cuda"):
            activities.append(ProfilerActivity.CUDA)
        folder, rank = info.folder / "trace", info.ctx.rank
        folder.mkdir(exist_ok=True)
        self._profiler = profile(
            activities=activities,
            schedule=schedule(
                skip_first=info.config.warmup_steps or 0,
                wait=self._plan.wait,
                warmup=self._plan.warmup,
                active=self._plan.active,
                repeat=1,
            ),
            on_trace_ready=lambda ready: self._write(ready, folder, rank),
            record_shapes=True,  # the sizes of gloo's collectives
            profile_memory=self._plan.memory,
        )
        self._profiler.start()

    @hookimpl
    def mtb_step_recorded(self) -> None:
        """A step has ended."""
        if self._profiler is not None:
            self._profiler.step()

    @hookimpl
    def mtb_run_finished(self) -> None:
        """Stop; a recording that was cut short is written as far as it is."""
        self._close()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    @hookimpl(wrapper=True)
    def mtb_micro_batch(self) -> Generator[None, _Context, _Context]:
        """Name the forward phase: from the beginning of a micro-batch to its backward."""
        inner = yield
        return self._named(inner)

    @contextmanager
    def _named(self, inner: _Context) -> Iterator[None]:
        with inner:
            self._open("mtb:forward")
            try:
                yield
            finally:
                self._close()

    @hookimpl(wrapper=True)
    def mtb_backward(self) -> Generator[None, Any, Any]:
        """Name the backward phase."""
        self._open("mtb:backward")
        try:
            return (yield)
        finally:
            self._close()

    @hookimpl(wrapper=True)
    def mtb_optimizer_step(self) -> Generator[None, Any, Any]:
        """Name the optimizer phase."""
        self._open("mtb:optimizer")
        try:
            return (yield)
        finally:
            self._close()

    def _open(self, name: str) -> None:
        """Begin a phase; it ends the one before."""
        self._close()
        self._range = record_function(name)
        self._range.__enter__()

    def _close(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _write(self, ready: profile, folder: Path, rank: int) -> None:
        path = trace_path(folder, rank)
        raw = path.with_suffix("").with_suffix(".part")
        try:
            ready.export_chrome_trace(str(raw))
            if self._plan.memory:
                memory_timeline(raw, folder / "memory" / f"rank_{rank:05d}.csv")
            publish_trace(raw, path)
        finally:
            raw.unlink(missing_ok=True)
        write_json(folder / "operators" / f"rank_{rank:05d}.json", _operators(ready))


def _operators(ready: profile) -> list[dict[str, Any]]:
    """The operators with the most time of their own, on the device where there is one."""
    rows = [
        {
            "name": row.key,
            "calls": row.count,
            "self_cpu_time_us": row.self_cpu_time_total,
            "self_device_time_us": row.self_device_time_total,
            "cpu_time_us": row.cpu_time_total,
            "device_time_us": row.device_time_total,
        }
        for row in ready.key_averages()
        if not row.key.startswith(("ProfilerStep", "mtb:")) and not row.is_user_annotation
    ]
    by = "self_device_time_us" if torch.cuda.is_available() else "self_cpu_time_us"
    return sorted(rows, key=lambda row: -row[by])[:_OPERATORS]
