"""Run plugin ``loss-spike``."""

from __future__ import annotations

import itertools
import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from guard_models import MARK
from guarded import DDP, SPIKING, Guarded

from mtb_core import Control, StepRecord
from mtb_guards.loss_spike import LossSpike
from mtb_guards.options import LossSpikeOptions
from mtb_kit.drills import SignalAt
from mtb_kit.examples import example_record, example_run


def started(control: Control, **options: Any) -> LossSpike:
    guard = LossSpike(LossSpikeOptions(window=3, factor=2.0, **options))
    guard.mtb_run_started(attrs.evolve(example_run(Path()), control=control))
    return guard


def record(step: int, loss: float, **more: Any) -> StepRecord:
    return example_record(step, loss=loss, **{"grad_norm": 1.0, **more})


def told(guard: LossSpike, losses: list[float], first: int = 1) -> None:
    for step, loss in enumerate(losses, first):
        guard.mtb_step_recorded(record(step, loss))


def test_what_a_spike_is() -> None:
    """More than so many times the median of a full window; it is not counted among the values, nor is a NaN."""
    control = Control()
    guard = started(control, at_most=5)
    told(guard, [9.0, 1.0])  # the window is not full
    told(guard, [50.0], 3)
    assert control.take().back is None
    told(guard, [2.0, 2.0, 2.0, float("nan"), 4.0, 1.0, 4.0], 4)  # twice the median is no spike
    assert control.take().back is None
    told(guard, [8.1], 11)  # the median of 4, 1, 4
    back = control.take().back
    assert back is not None
    assert (back.before, back.leave_out) == (11, None)
    assert back.reason == "loss-spike: loss 8.1 of step 11 is more than 2 times the median 4"
    assert list(guard.mtb_plugin_state()["values"]) == [4.0, 1.0, 4.0]
    told(guard, [100.0], 12)  # nothing is seen until the run has gone back
    assert control.take().back is None


def test_the_gradient_norm_can_be_watched() -> None:
    """Then the loss does not matter."""
    control = Control()
    guard = started(control, watch="grad_norm", leave_out=4)
    for step, norm in enumerate([1.0, 1.0, 1.0, 3.0], 1):
        guard.mtb_step_recorded(record(step, 10.0**step, grad_norm=norm))
    back = control.take().back
    assert back is not None
    assert (back.before, back.leave_out) == (4, 4)
    assert "gradient norm 3" in back.reason


def test_at_most_so_often() -> None:
    """Going back does not take back how often it has acted; afterwards a spike is a value like others."""
    control = Control()
    guard = started(control, at_most=2)
    told(guard, [1.0, 1.0, 1.0])
    saved = json.loads(json.dumps(guard.mtb_plugin_state()))
    assert (saved["acted"], saved["asked"]) == (0, None)
    for _ in range(2):
        told(guard, [5.0], 4)
        assert control.take().back is not None
        guard.mtb_phase("load")
        guard.mtb_plugin_state_loaded(saved)
        assert control.take().save
    told(guard, [5.0], 4)
    assert control.take().back is None
    assert guard.mtb_result() == {"acted": 2, "at_most": 2}
    assert guard.mtb_plugin_state() == {"values": [1.0, 1.0, 5.0], "acted": 2, "asked": None}


def test_a_run_that_was_stopped_first_asks_again() -> None:
    """What it had asked for is in the checkpoint at which the run was stopped."""
    control = Control()
    guard = started(control)
    told(guard, [1.0, 1.0, 1.0, 5.0])
    state = json.loads(json.dumps(guard.mtb_plugin_state()))
    resumed, again = LossSpike(LossSpikeOptions(window=3)), Control()
    resumed.mtb_phase("load")
    resumed.mtb_plugin_state_loaded(state)
    resumed.mtb_run_started(attrs.evolve(example_run(Path()), control=again))
    back = again.take().back
    assert back is not None
    assert back.before == 4
    assert resumed.mtb_result()["acted"] == 1


def test_skipping() -> None:
    """The update of the spike is left out, at most so often; its value is not remembered."""
    guard = started(Control(), action="skip", at_most=1)
    told(guard, [1.0, 1.0, 1.0])
    assert guard.mtb_before_update(4, 2.0, 1.0) is None
    told(guard, [2.0], 4)
    reason = guard.mtb_before_update(5, 5.0, 1.0)
    assert reason is not None
    guard.mtb_step_recorded(record(5, 5.0, skipped=True))
    assert guard.mtb_plugin_state()["values"] == [1.0, 1.0, 2.0]
    assert guard.mtb_before_update(6, 5.0, 1.0) is None


@pytest.fixture
def guarded(tmp_path: Path) -> Guarded:
    return Guarded(tmp_path)


def settings(guarded: Guarded) -> dict[str, Any]:
    """Two ranks; one sample of 41, so one step in four, has a loss that is twenty times as high."""
    return {**DDP, **SPIKING, "data": guarded.data("marked", mark=MARK), "learning_rate": 1e-3}


def spikes(losses: list[float]) -> list[int]:
    return [step for step, loss in enumerate(losses, 1) if loss > 20]


GUARDS = {"loss-spike.window": 3, "loss-spike.factor": 3.0}


def test_going_back_leaves_the_batch_out(guarded: Guarded) -> None:
    """The batch of the spike is not trained on; at most so often; the count outlives going back, and a resume."""
    given = settings(guarded)
    _, plain = guarded.run("plain", {}, **given, until_step=8)
    spike = next(step for step in spikes(plain[0].losses) if step > 1)
    guards = {**GUARDS, "loss-spike.at_most": 1, "loss-spike.window": 1}
    result, ranks = guarded.run("run", guards, **given, **guarded.saving(1), until_step=6)
    assert result.exit_reason == "done", result.failure
    (action,) = [each for each in result.runtime["actions"] if each["action"] == "roll_back"]
    assert (action["step"], action["to"]) == (spike + 1, spike - 1)
    assert f"of step {spike} is more than 3 times the median" in action["reason"]
    steps = [record.global_step for record in ranks[0].records]
    assert steps == [*range(1, spike + 2), *range(spike, 7)]
    # The data go on where they were: samples are counted as consumed that were left out.
    sizes = {4: 5}  # of the last step of an epoch of 41; all others have 12
    seen = [record.samples_seen for record in ranks[0].records]
    assert seen == list(itertools.accumulate(sizes.get((n - 1) % 4 + 1, 12) for n in range(1, len(seen) + 1)))
    assert action["samples_left_out"] == seen[spike] - (seen[spike - 2] if spike > 1 else 0)
    assert guarded.saved_state(6, "loss-spike")["acted"] == 1
    assert result.plugin_results["loss-spike"] == {"acted": 1, "at_most": 1}
    result, ranks = guarded.run("more", guards, **given, **guarded.saving(1), until_step=14, resume="latest")
    assert spikes(ranks[0].losses)  # and nothing is done about them
    assert [a for a in result.runtime["actions"] if a["action"] == "roll_back"] == []
    assert result.plugin_results["loss-spike"]["acted"] == 1


def test_a_signal_in_the_step_of_the_spike(guarded: Guarded) -> None:
    """The run stops with the checkpoint of a spoilt training; resumed, it goes back before anything else."""
    given = settings(guarded)
    _, plain = guarded.run("plain", {}, **given, until_step=12)
    spike = next(step for step in spikes(plain[0].losses) if step > 4)
    stops = {"signal": partial(SignalAt, 1, spike, signal.SIGTERM)}
    result, _ = guarded.run("run", GUARDS, plugins=stops, **given, **guarded.saving(1), until_step=12)
    assert (result.exit_reason, result.global_step) == ("stopped", spike + 1)
    assert guarded.saved_state(spike + 1, "loss-spike")["asked"]["before"] == spike
    result, ranks = guarded.run("rest", GUARDS, **given, **guarded.saving(1), until_step=12, resume="latest")
    assert result.exit_reason == "done", result.failure
    back = next(a for a in result.runtime["actions"] if a["action"] == "roll_back")
    assert (back["step"], back["to"]) == (spike + 2, spike - 1)
    assert [r.global_step for r in ranks[0].records][:2] == [spike + 2, spike]


def test_skipping_on_two_ranks(guarded: Guarded) -> None:
    """The steps of spikes are without update, as many as may be."""
    given = settings(guarded)
    guards = {**GUARDS, "loss-spike.action": "skip", "loss-spike.at_most": 2}
    result, ranks = guarded.run("run", guards, **given, until_step=16)
    losses = ranks[0].losses
    expected = [step for step in spikes(losses) if step > 3][:2]
    assert [r.global_step for r in ranks[1].records if r.skipped] == expected
    assert [a["step"] for a in result.runtime["actions"]] == expected
    assert result.skipped_steps == 2
