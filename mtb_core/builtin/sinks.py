"""The sinks that come with core: `jsonl` (metrics lines and a heartbeat, every rank) and `console` (progress).

Like any plugin's, they import nothing but the public names of `mtb_core`. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

import attrs

from mtb_core import NoOptions, RunInfo, StepRecord, hookimpl

#: Progress is handed on at most this often; people do not read faster, and every message costs the training thread.
PROGRESS_INTERVAL_S = 0.1
#: A heartbeat is refreshed at most this often.
HEARTBEAT_INTERVAL_S = 1.0

_BOOLEAN = ("false", "true")


def metrics_line(record: StepRecord) -> str:
    """One line of ``metrics/rank_*.jsonl``: strict JSON with the fields of `record` in their order, newline included.

    A non-finite number is null, and ``nonfinite`` is then true. Floats are written so that reading them gives the
    same bits. The line is put together by hand, which takes a third of the time of `json.dumps` (6 µs against 17 µs):
    it is written after every step.
    """
    r = record
    # One test instead of ten: a sum is finite only if all its terms are. An overflow only costs the slower way.
    total = r.loss + r.grad_norm + r.learning_rate + r.data_time_ms + r.forward_backward_ms + r.optimizer_step_ms
    total += r.step_time_ms + r.checkpoint_time_ms + r.memory_mib + (r.param_norm or 0.0)
    if r.metrics or not math.isfinite(total):
        return _line_with_nulls(record)
    return (
        f'{{"global_step": {r.global_step}, "loss": {r.loss}, "grad_norm": {r.grad_norm}, '
        f'"param_norm": {"null" if r.param_norm is None else r.param_norm}, '
        f'"learning_rate": {r.learning_rate}, "clipped": {_BOOLEAN[r.clipped]}, "skipped": {_BOOLEAN[r.skipped]}, '
        f'"nonfinite": {_BOOLEAN[r.nonfinite]}, "samples_seen": {r.samples_seen}, "tokens_seen": {r.tokens_seen}, '
        f'"valid_tokens": {r.valid_tokens}, "data_time_ms": {r.data_time_ms}, '
        f'"forward_backward_ms": {r.forward_backward_ms}, "optimizer_step_ms": {r.optimizer_step_ms}, '
        f'"step_time_ms": {r.step_time_ms}, "checkpoint_time_ms": {r.checkpoint_time_ms}, '
        f'"memory_mib": {r.memory_mib}, "warmup": {_BOOLEAN[r.warmup]}, "time": "{r.time}", "metrics": {{}}}}\n'
    )


def _line_with_nulls(record: StepRecord) -> str:
    fields = attrs.asdict(record)
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            fields[name] = None
            fields["nonfinite"] = True
    fields["metrics"] = {name: _finite(value) for name, value in record.metrics.items()}
    return json.dumps(fields, allow_nan=False) + "\n"


def rank_file(folder: Path, trial: int, rank: int, suffix: str) -> Path:
    """File of a rank's metrics: ``metrics/rank_00000.jsonl``, from the second trial on ``metrics/trial_001/…``."""
    metrics = folder / "metrics"
    return (metrics / f"trial_{trial:03d}" if trial else metrics) / f"rank_{rank:05d}{suffix}"


class JsonlSink:
    """Sink ``jsonl``: every rank appends a metrics line per step and refreshes its heartbeat.

    A line goes to the operating system whole and at once (2 µs), so neither a kill nor a hang loses or tears one. A
    run resumed in the same folder goes on in the same file; where it repeats steps, the later line is the one in
    force. ``heartbeat/rank_*.json`` holds ``global_step`` (last one ended), ``time`` (UTC) and ``phase``
    (``"training"`` or ``"finished"``).
    """

    def __init__(self, options: NoOptions) -> None:  # noqa: ARG002  (sinks are made with their options)
        self._file: FileIO | None = None
        self._heartbeat = Path()
        self._step = 0
        self._next_beat = 0.0

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """Open the files."""
        path = rank_file(info.folder, info.trial, info.ctx.rank, ".jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = path.open("ab", buffering=0)
        self._heartbeat = info.folder / "heartbeat" / f"rank_{info.ctx.rank:05d}.json"
        self._heartbeat.parent.mkdir(parents=True, exist_ok=True)
        self._step = info.first_step - 1
        self._beat("training")

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        """Append the line."""
        if self._file is None:
            return
        line = metrics_line(record).encode()
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file.name))
        self._step = record.global_step
        if time.monotonic() >= self._next_beat:
            self._beat("training")

    @hookimpl
    def mtb_evaluated(self) -> None:
        """An evaluation may take long; its end is a sign of life."""
        if self._file is not None:
            self._beat("training")

    @hookimpl
    def mtb_run_finished(self) -> None:
        """Close the files."""
        if self._file is None:
            return
        file, self._file = self._file, None
        file.close()
        self._beat("finished")

    def _beat(self, phase: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        temporary = self._heartbeat.with_suffix(".tmp")
        temporary.write_text(json.dumps({"global_step": self._step, "time": now, "phase": phase}) + "\n")
        temporary.replace(self._heartbeat)
        self._next_beat = time.monotonic() + HEARTBEAT_INTERVAL_S


def _drop_torn_line(path: Path) -> None:
    """Cut off what follows the last newline: a line that a full disk or a power cut left unfinished."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - 4096)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position != end:
            file.truncate(position)


class ConsoleSink:
    """Sink ``console``: rank 0 tells whoever owns the terminal how far the run is, through ``info.progress``.

    The messages are small JSON mappings with an ``event``:

    - ``start``: ``first_step``, ``last_step``, ``trial``;
    - ``step``: ``step``, ``loss`` (null if not finite), ``tokens_per_sec`` (valid tokens of the global batch against
      this rank's step times, since the message before; null if no time passed), ``warmup``, ``nonfinite``,
      ``skipped``, ``metrics`` (by name, null if not finite); the first step, the last, those that are not finite, and
      of the others at most ten a second;
    - ``eval``: ``step``, ``eval_loss`` (null if not finite);
    - ``finish``: ``exit_reason``.
    """

    def __init__(self, options: NoOptions) -> None:  # noqa: ARG002  (sinks are made with their options)
        self._info: RunInfo | None = None
        self._pending: StepRecord | None = None
        self._next = 0.0
        self._busy_ms = 0.0
        self._tokens = 0

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """Announce the first and last step."""
        if info.ctx.rank != 0:
            return
        self._info = info
        info.progress(
            {"event": "start", "first_step": info.first_step, "last_step": info.last_step, "trial": info.trial}
        )

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        """Hand the step on, if it is time."""
        if self._info is None:
            return
        self._pending = record
        self._tokens += record.valid_tokens
        self._busy_ms += record.step_time_ms
        due = time.monotonic() >= self._next
        if due or record.nonfinite or record.global_step in (self._info.first_step, self._info.last_step):
            self._send_step(self._info, record)

    @hookimpl
    def mtb_evaluated(self, global_step: int, loss: float) -> None:
        """Hand the evaluation's loss on."""
        if self._info is not None:
            self._info.progress({"event": "eval", "step": global_step, "eval_loss": _finite(loss)})

    @hookimpl
    def mtb_run_finished(self, exit_reason: str) -> None:
        """Hand on the last step, if it was held back, and the end."""
        info, self._info = self._info, None
        if info is None:
            return
        if self._pending is not None:
            self._send_step(info, self._pending)
        info.progress({"event": "finish", "exit_reason": exit_reason})

    def _send_step(self, info: RunInfo, record: StepRecord) -> None:
        fields: dict[str, Any] = {
            "event": "step",
            "step": record.global_step,
            "loss": _finite(record.loss),
            "tokens_per_sec": self._tokens / self._busy_ms * 1e3 if self._busy_ms > 0.0 else None,
            "warmup": record.warmup,
            "nonfinite": record.nonfinite,
            "skipped": record.skipped,
            "metrics": {name: _finite(value) for name, value in record.metrics.items()},
        }
        info.progress(fields)
        self._pending = None
        self._tokens, self._busy_ms = 0, 0.0
        self._next = time.monotonic() + PROGRESS_INTERVAL_S


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
