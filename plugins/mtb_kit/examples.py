"""Plausible values of what observers are told, for tests of sinks that need no training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from mtb_core.api.layout import Layout, World
from mtb_core.api.records import RunInfo, StepRecord
from mtb_core.api.values import RankContext
from mtb_core.config import TrainConfig


def example_record(step: int, **changes: Any) -> StepRecord:
    """A record of `step`; every number in it is exact in binary, so that files can be compared. `changes` win."""
    record = StepRecord(
        global_step=step,
        loss=5.0 - step / 8,
        grad_norm=1.25,
        param_norm=None,
        learning_rate=1e-3,
        clipped=False,
        skipped=False,
        nonfinite=False,
        samples_seen=16 * step,
        tokens_seen=2048 * step,
        valid_tokens=2048,
        data_time_ms=0.0625,
        forward_backward_ms=4.5,
        optimizer_step_ms=0.5,
        step_time_ms=5.0625,
        checkpoint_time_ms=0.0,
        memory_mib=321.5,
        warmup=step <= 2,
        time="2030-01-02T03:04:05.678+00:00",
    )
    return attrs.evolve(record, **changes)


def _nobody(_fields: dict[str, Any]) -> None:
    """Progress that nobody shows."""


def example_run(
    folder: Path,
    rank: int = 0,
    *,
    size: int = 2,
    local_size: int | None = None,
    first: int = 1,
    last: int = 10,
    trial: int = 0,
    config: TrainConfig | None = None,
    progress: Callable[[dict[str, Any]], None] = _nobody,
) -> RunInfo:
    """The start of a trial on `rank` of `size` data-parallel ranks, `local_size` of them (all) on each node."""
    local = local_size or size
    ctx = RankContext(rank, rank % local, World(size, local), "cpu", None, Layout((("dp", size),)))
    return RunInfo(config or TrainConfig(), ctx, folder, first, last, trial, progress)
