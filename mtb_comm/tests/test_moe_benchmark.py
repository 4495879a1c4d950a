"""Ranks act together around the measurement."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from mtb_comm.moe.benchmark import Work, measure_points
from mtb_comm.moe.clock import Clock
from mtb_comm.moe.settings import RouteSettings
from mtb_core import gather_objects, run_ranks

TINY = RouteSettings(tokens_per_rank=8, hidden_size=4, ffn_size=4, iters=4, warmup=2, num_experts=3)


class StopLater:
    """A stop flag that is set once it was asked `times` times."""

    def __init__(self, times: int) -> None:
        self._left = times

    @property
    def requested(self) -> str | None:
        self._left -= 1
        return "SIGTERM" if self._left < 0 else None


def stop_on_one(work: Work, ctx: Any, worker: Any) -> list[list[float]]:
    """Rank 1 alone is asked to stop, in the middle of the second point."""
    worker = attrs.evolve(worker, stop=StopLater(9 if ctx.rank == 1 else 10**9))
    found = measure_points(work, ctx, worker)
    return gather_objects(ctx, [row["capacity_factor"] for row in found["rows"]])


def test_ranks_stop_together():
    """If one rank is asked to stop, all stop after the same iteration, with the same finished rows."""
    work = Work(tuple(attrs.evolve(TINY, capacity_factor=factor) for factor in (1.0, 2.0, 3.0)))
    outcome = run_ranks(stop_on_one, work, nproc=2, device="cpu")
    assert outcome.value == [[1.0], [1.0]], outcome.failure


def other_settings(work: Work, ctx: Any, worker: Any) -> Any:
    points = tuple(attrs.evolve(point, seed=ctx.rank) for point in work.points)
    return measure_points(attrs.evolve(work, points=points), ctx, worker)


def test_ranks_with_other_settings_are_refused():
    """Ranks that were started with different settings say so at once, rather than hang."""
    outcome = run_ranks(other_settings, Work((TINY,)), nproc=2, device="cpu")
    assert outcome.exit_reason == "failed"
    assert "do not agree on what to measure" in outcome.failure.message


def test_phases_fill_the_time(monkeypatch: pytest.MonkeyPatch):
    """Every moment between start and the last lap belongs to one phase; a phase that comes again is added up."""
    times = iter([1.0, 1.5, 3.5, 4.0, 10.0, 11.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Clock("cpu")
    clock.start()
    for name in ("gate", "dispatch", "gate"):
        clock.lap(name)
    assert clock.phases() == {"gate": 1000.0, "dispatch": 2000.0}
    clock.start()
    clock.lap("expert")
    assert clock.phases() == {"expert": 1000.0}
