"""Training runs among the results: which, in what order, and how sure their figures are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mtb_core import summarize
from mtb_report.results import Record

from . import scaling
from .naming import Named

#: The parts of a step, and where their times are.
PARTS = (("data", "data_time_ms"), ("forward and backward", "forward_backward_ms"), ("optimizer", "optimizer_step_ms"))

#: As a share of the least.
MEMORY_SPREAD = 0.05


def of_training(rows: Sequence[Named]) -> list[Named]:
    """The training runs among `rows`: by work and strategy in the order in which they appear, then by ranks.

    Runs whose number of ranks is not known come last among their like.
    """
    runs = [row for row in rows if row.record.kind == "training"]
    groups: dict[Any, list[Named]] = {}
    for row in runs:
        key = (scaling.batch_folder(row.record), scaling.work_of(row.record), scaling.scheme_of(row.record))
        groups.setdefault(key, []).append(row)
    return [row for group in groups.values() for row in sorted(group, key=_ranks)]


def _ranks(row: Named) -> float:
    ranks = row.record.get("world_size")
    return math.inf if ranks is None else ranks


def interval(record: Record, figure: str) -> tuple[float, float, int] | None:
    """(low, high, number of trials) of the 95% confidence interval of the mean; None without one."""
    spread = record.summary.get(figure) or summarize([row.get(figure) for row in record.trials]) or {}
    return (*spread["ci95"], spread["n"]) if spread.get("ci95") else None


def memory_spread(record: Record) -> tuple[float, float] | None:
    """(least, most) peak memory of the trials in MiB where they differ by more than `MEMORY_SPREAD`; else None.

    The same training takes the same memory each time; a trial may have held what an earlier one left.
    """
    spread = record.summary.get("max_memory_mib") or {}
    least, most = spread.get("min"), spread.get("max")
    return (least, most) if least and most and most > (1 + MEMORY_SPREAD) * least else None
