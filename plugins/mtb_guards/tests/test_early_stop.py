"""Run plugin ``early-stop``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from guarded import DDP, Guarded

from mtb_core import Control
from mtb_guards.early_stop import EarlyStop
from mtb_guards.options import EarlyStopOptions
from mtb_kit.examples import example_run


def started(control: Control, **options: Any) -> EarlyStop:
    import attrs

    guard = EarlyStop(EarlyStopOptions(**options))
    guard.mtb_run_started(attrs.evolve(example_run(Path()), control=control))
    return guard


def asked_after(losses: list[float], **options: Any) -> list[int]:
    """Numbers of the evaluations after which it asks to finish."""
    control, out = Control(), []
    guard = started(control, **options)
    for number, loss in enumerate(losses, 1):
        guard.mtb_evaluated(number, loss)
        if control.take().finish is not None:
            out.append(number)
    return out


NAN = float("nan")


@pytest.mark.parametrize(
    ("losses", "options", "expected"),
    [
        ([5, 4, 3, 2], {"patience": 1}, []),
        ([5, 4, 4, 3], {"patience": 1}, [3]),
        ([5, 4, 4, 3, 3, 3], {"patience": 2}, [6]),
        ([5, 4.9, 4.8, 4.7], {"patience": 2, "min_delta": 0.15}, []),
        ([5, 4.9, 4.8, 4.7], {"patience": 1, "min_delta": 0.15}, [2, 4]),
        ([5, NAN, NAN, 4], {"patience": 2}, [3]),
        ([NAN, NAN], {"patience": 2}, [2]),
        ([5, 2, 1.9, 3], {"target": 2.0}, [2, 3]),
        ([NAN, 5], {"target": 6.0}, [2]),
    ],
)
def test_when_it_asks(losses: list[float], options: dict[str, Any], expected: list[int]) -> None:
    """After so many losses without improvement in a row, by more than min_delta, or at the target; NaN improves nothing."""
    assert asked_after(losses, **options) == expected


def test_it_asks_again_after_a_resume() -> None:
    """Where a signal ended the run between reason and end; with more patience it does not."""
    first = started(Control(), patience=2)
    for step, loss in enumerate([3.0, 4.0, 4.0], 1):
        first.mtb_evaluated(step, loss)
    state = json.loads(json.dumps(first.mtb_plugin_state()))
    for patience, asks in ((2, True), (3, False)):
        control = Control()
        guard = EarlyStop(EarlyStopOptions(patience=patience))
        guard.mtb_phase("load")
        guard.mtb_plugin_state_loaded(state)
        import attrs

        guard.mtb_run_started(attrs.evolve(example_run(Path()), control=control))
        assert (control.take().finish is not None) is asks


def test_patience_with_evaluations(tmp_path: Path) -> None:
    """On two ranks: done, exit code 0, the reason, a checkpoint to keep, and the best loss in the result."""
    guarded = Guarded(tmp_path)
    guards = {"early-stop.patience": 2, "early-stop.min_delta": 100.0}
    evaluation = {"eval_data": guarded.data("eval", 64, 128), "eval_every": 2}
    result, ranks = guarded.run(
        "run", guards, **DDP, **evaluation, until_step=20, checkpoint_dir=str(guarded.checkpoints)
    )
    losses = guarded.evaluations("run")
    assert (result.exit_reason, result.exit_code) == ("done", 0)
    assert [step for step, _ in losses] == [2, 4, 6, 7]
    assert [len(rank.records) for rank in ranks] == [7, 7]
    assert result.stop_reason is not None
    assert result.stop_reason.startswith("early-stop: 2 evaluations without improvement on the loss ")
    assert result.stop_reason.endswith("of step 2")
    found = result.plugin_results["early-stop"]
    assert (found["best"], found["best_step"], found["waited"]) == (losses[0][1], 2, 3)
    assert result.runtime["ready_checkpoints"] == [7]


def test_target_with_training(tmp_path: Path) -> None:
    """A training loss at the target ends the run; resumed, it ends again as soon as it may."""
    guarded = Guarded(tmp_path)
    guards = {"early-stop.watch": "train", "early-stop.target": 100.0}
    result, _ = guarded.run("first", guards, until_step=9, checkpoint_dir=str(guarded.checkpoints))
    assert (result.exit_reason, result.global_step) == ("done", 2)
    assert "of step 1 is at most 100" in str(result.stop_reason)
    assert guarded.saved_state(2, "early-stop")["last_step"] == 2
    result, _ = guarded.run("more", guards, until_step=9, checkpoint_dir=str(guarded.checkpoints), resume="latest")
    assert (result.exit_reason, result.global_step) == ("done", 3)
