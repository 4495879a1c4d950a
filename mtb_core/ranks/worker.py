"""A worker: the process of one rank, however it was started."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import attrs

from mtb_core.api.layout import World

from .signals import StopFlag

LaunchedBy = Literal["mtb", "torchrun", "slurm", "self"]


def available_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _nobody(_fields: dict[str, Any]) -> None:
    """Progress where nobody shows it."""


@attrs.frozen
class Worker:
    """A rank before any communication: number, world, stop requests, progress.

    Attributes:
        stop: whether this process was asked to stop.
        launched_by: ``"mtb"`` (our launcher), ``"torchrun"``, ``"slurm"``, or ``"self"``: one rank in this process.
        restarts: how often the ranks were started again after a failure.
        progress: ``progress(fields)`` hands a small mapping of JSON values to the launcher; it never blocks, and
            what does not fit is dropped.
        attempt: names this start of all ranks; the same on every rank, another one after a restart.
    """

    rank: int
    local_rank: int
    world: World
    stop: StopFlag
    launched_by: LaunchedBy
    restarts: int = 0
    progress: Callable[[dict[str, Any]], None] = _nobody
    attempt: str = "0"
