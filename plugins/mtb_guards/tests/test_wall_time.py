"""Run plugin ``wall-time``."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from guarded import DDP, Guarded

from mtb_core import Control
from mtb_guards import wall_time
from mtb_guards.options import WallTimeOptions
from mtb_guards.wall_time import WallTime
from mtb_kit.examples import example_run


def test_when_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """When limit less margin is nearer than two of the longest steps but the first, counted from the start of `mtb`."""
    now = [100.0]
    monkeypatch.setattr(wall_time.time, "monotonic", lambda: now[0])
    control = Control()
    guard = WallTime(WallTimeOptions(limit="10m", margin="1m"))
    guard.mtb_run_started(attrs.evolve(example_run(Path()), control=control, started=50.0))
    asked = []
    for time in (400.0, 410.0, 440.0, 450.0, 500.0, 529.0, 530.0):  # 590 is where the margin begins
        now[0] = time
        guard.mtb_step_recorded()
        asked.append(control.take().stop)
    assert [reason is not None for reason in asked] == [False] * 4 + [True] * 3
    assert asked[4] == "wall-time: 450 s of 600 s are over, with a margin of 60 s"
    assert guard.mtb_result() == {"limit_s": 600.0, "margin_s": 60.0, "longest_step_s": 50.0}


def test_it_stops_with_a_checkpoint(tmp_path: Path) -> None:
    """On two ranks: exit code 4, the reason, and a checkpoint from which the rest is that of an uninterrupted run."""
    guarded = Guarded(tmp_path)
    _, whole = guarded.run("whole", {}, **DDP, until_step=4)
    guards = {"wall-time.limit": "1", "wall-time.margin": "0"}
    place = {"checkpoint_dir": str(guarded.checkpoints)}
    result, first = guarded.run("first", guards, **DDP, **place, until_step=100_000)
    assert (result.exit_reason, result.exit_code) == ("stopped", 4)
    assert str(result.stop_reason).startswith("wall-time: ")
    assert result.runtime["ready_checkpoints"] == [result.global_step]
    result, rest = guarded.run("rest", {}, **DDP, **place, until_step=result.global_step + 3, resume="latest")
    assert result.exit_reason == "done"
    losses = first[0].losses + rest[0].losses
    assert losses[:4] == whole[0].losses[: len(losses)]
