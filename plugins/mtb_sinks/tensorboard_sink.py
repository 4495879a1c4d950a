"""Sink ``tensorboard``: event files, written with tensorboard's own record writer.

Neither torch's nor tensorboard's event writer is used: both start a thread and import TensorFlow, with all that it
prints, where that is installed; and both write the machine's name into the file's name.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from mtb_core import RunInfo, StepRecord, hookimpl

from .options import TensorboardOptions

#: Events reach the file at most this late.
FLUSH_INTERVAL_S = 2.0

_TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "param_norm": "train/param_norm",
    "learning_rate": "train/learning_rate",
    "samples_seen": "train/samples_seen",
    "tokens_seen": "train/tokens_seen",
    "step_time_ms": "time/step_time_ms",
    "data_time_ms": "time/data_time_ms",
    "forward_backward_ms": "time/forward_backward_ms",
    "optimizer_step_ms": "time/optimizer_step_ms",
    "checkpoint_time_ms": "time/checkpoint_time_ms",
    "memory_mib": "memory/memory_mib",
}


class TensorboardSink:
    """Writes scalars of rank 0, tagged ``train/loss``, ``time/step_time_ms``, ``eval/loss`` and so on, by global step.

    One event file per trial. Steps that a resumed run takes again replace the earlier ones in TensorBoard.
    """

    def __init__(self, options: TensorboardOptions) -> None:
        self._options = options
        self._events: _EventFile | None = None
        self._ends: tuple[int, int] = (0, 0)

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """Open the event file."""
        if info.ctx.rank != 0:
            return
        given = self._options.folder
        folder = info.folder / "tensorboard" if given is None else Path(given) / info.folder.name
        if info.trial:
            folder /= f"trial_{info.trial:03d}"
        self._ends = (info.first_step, info.last_step)
        self._events = _EventFile(folder)
        self._events.start(info.first_step)

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        """Write the step's scalars, if it is one of those to be written."""
        step = record.global_step
        if self._events is None:
            return
        if step % self._options.every == 0 or step in self._ends or record.nonfinite:
            values = {tag: getattr(record, name) for name, tag in _TAGS.items()}
            self._events.scalars(step, {tag: value for tag, value in values.items() if value is not None})

    @hookimpl
    def mtb_evaluated(self, global_step: int, loss: float) -> None:
        """Write the evaluation's loss."""
        if self._events is not None:
            self._events.scalars(global_step, {"eval/loss": loss})

    @hookimpl
    def mtb_run_finished(self) -> None:
        """Close the event file."""
        events, self._events = self._events, None
        if events is not None:
            events.close()


class _EventFile:
    """A TensorBoard event file: records of protocol buffers, in one file that only this process writes."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415  (imported when it is used)
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

        self._event, self._summary = event_pb2, summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads a folder's files in the order of their names, so the time comes first.
        name = f"events.out.tfevents.{time.time_ns():020d}.{os.getpid()}"
        self._records = RecordWriter((folder / name).open("xb"))
        self._next_flush = 0.0

    def start(self, first_step: int) -> None:
        """Open the file's history; a reader then drops what earlier files say of `first_step` and later steps."""
        self._write(file_version="brain.Event:2")
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(step=first_step, session_log=log)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add values by tag. A float32 is all that an event holds; what is beyond its range becomes infinite."""
        entries = [self._summary.Summary.Value(tag=tag, simple_value=_float32(v)) for tag, v in values.items()]
        self._write(step=step, summary=self._summary.Summary(value=entries))

    def close(self) -> None:
        """Write what is left."""
        self._records.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event.Event(wall_time=time.time(), **fields).SerializeToString())
        if time.monotonic() >= self._next_flush:
            self._records.flush()
            self._next_flush = time.monotonic() + FLUSH_INTERVAL_S


def _float32(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) > 3.4028234e38 else value
