from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from mtb_core import Layout, RankContext, RunInfo, StepRecord, TrainConfig, World


def make_record(step: int, **changes: object) -> StepRecord:
    """A plausible record of `step`."""
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


@pytest.fixture
def record() -> Callable[..., StepRecord]:
    """`make_record`."""
    return make_record


@pytest.fixture
def info(tmp_path: Path) -> Callable[..., RunInfo]:
    """Makes the RunInfo of a rank; the run's folder is ``<tmp_path>/myrun``."""

    def make(rank: int = 0, *, size: int = 1, local_size: int | None = None, trial: int = 0, first: int = 1) -> RunInfo:
        local = local_size or size
        folder = tmp_path / "myrun"
        folder.mkdir(exist_ok=True)
        ctx = RankContext(rank, rank % local, World(size, local), "cpu", None, Layout((("dp", size),)))
        return RunInfo(TrainConfig(strategy="ddp"), ctx, folder, first, first + 9, trial, lambda fields: None)

    return make
