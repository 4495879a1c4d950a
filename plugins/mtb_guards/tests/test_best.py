"""Run plugin ``best``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from guarded import DDP, Guarded, tensors

from mtb_checkpoint import verify_checkpoint
from mtb_core import Control, Piece, State, TrainConfig
from mtb_core.ckpt.manager import CheckpointManager
from mtb_guards import best
from mtb_guards.best import Best
from mtb_guards.options import BestOptions
from mtb_kit.examples import example_run


@pytest.mark.parametrize("more", [{}, {"async_save": False, **DDP}], ids=["async", "sync, 2 ranks"])
def test_the_best_survives_pruning(more: dict[str, Any], tmp_path: Path) -> None:
    """Each evaluated step is saved; the best of them is kept whole, whatever the retention removes, and can be resumed."""
    guarded = Guarded(tmp_path)
    # What it learns makes it worse on other bytes, so that the first evaluation is the best.
    evaluation = {"eval_data": guarded.data("eval", 64, 128), "eval_every": 2}
    saving = guarded.saving(3, keep_last=1)
    guards = {"best.folder": "best"}
    result, _ = guarded.run("run", guards, **evaluation, **saving, until_step=7, **more)
    losses = dict(guarded.evaluations("run"))
    assert list(losses) == [2, 4, 6, 7]
    assert min(losses, key=losses.__getitem__) == 2
    expected = {"checkpoint": "best/step_00000002", "step": 2, "eval_loss": losses[2]}
    assert result.plugin_results["best"] == expected
    assert result.runtime["ready_checkpoints"] == [7]
    kept = guarded.checkpoints / "best" / "step_00000002"
    assert verify_checkpoint(kept).ok
    assert sorted(path.name for path in kept.parent.iterdir()) == ["latest", "losses.json", "step_00000002"]
    again, _ = guarded.run("again", {}, **more, until_step=3, resume=str(kept))
    assert (again.exit_reason, again.global_step) == ("done", 3)
    assert again.runtime["resume_deterministic"] is True


def test_a_better_one_takes_its_place(tmp_path: Path) -> None:
    """Also one of the last step, of which only it wants a checkpoint; a resumed run knows what is kept."""
    guarded = Guarded(tmp_path)
    evaluation = {"eval_data": guarded.data("text"), "eval_every": 2}  # what it learns, it gets better on
    place, guards = {"checkpoint_dir": str(guarded.checkpoints)}, {"best.folder": "kept"}
    result, _ = guarded.run("first", guards, **evaluation, **place, until_step=3)
    assert [step for step, _ in guarded.evaluations("first")] == [2, 3]
    assert result.runtime["actions"] == [{"step": step, "action": "save"} for step in (2, 3)]
    assert result.plugin_results["best"]["checkpoint"] == "kept/step_00000003"
    worse = {**evaluation, "eval_data": guarded.data("eval", 64, 128)}
    result, _ = guarded.run("second", guards, **worse, **place, until_step=5, resume="latest")
    assert result.plugin_results["best"]["step"] == 3
    folder = guarded.checkpoints / "kept"
    assert [path.name for path in folder.glob("step_*")] == ["step_00000003"]
    assert tensors(folder / "step_00000003", "model/").keys() == tensors(guarded.checkpoint(5), "model/").keys()


class Saved:
    """A folder of checkpoints, and a `best` on rank 0 that is told of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manager = CheckpointManager(folder, asynchronous=False)
        self.manager.preflight()
        config = TrainConfig(checkpoint_dir=str(folder), eval_data="synthetic", eval_batches=1, eval_every=2)
        info = example_run(folder, size=1, config=config, first=2)
        self.control = Control()
        self.info = attrs.evolve(info, control=self.control)
        self.best = self.started()

    def started(self, **changes: Any) -> Best:
        guard = Best(BestOptions())
        guard.mtb_run_started(attrs.evolve(self.info, **changes))
        return guard

    def publish(self, step: int) -> None:
        tensor = torch.full((3,), float(step))
        self.manager.save(step, State({"model/a": [Piece(tensor, (3,), (0,))]}))
        self.best.mtb_checkpoint_published(self.folder / f"step_{step:08d}", step)

    @property
    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "best").glob("step_*"))


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path / "c")


def test_it_asks_for_evaluated_steps(saved: Saved) -> None:
    """As such a step begins, so that its own state is saved; the last step is evaluated too."""
    asked = []
    for step in range(1, 11):
        saved.best.mtb_phase("step", step)
        asked.append(saved.control.take().save)
    assert asked == [step % 2 == 0 for step in range(1, 11)]
    saved.info = attrs.evolve(saved.info, last_step=9)
    saved.started().mtb_phase("step", 9)
    assert saved.control.take().save


@pytest.mark.parametrize("evaluated_first", [True, False])
def test_evaluated_before_or_after_it_is_complete(saved: Saved, evaluated_first: bool) -> None:
    """Both must have happened; which is first depends on how long writing takes."""
    for step, loss in ((2, 3.0), (4, 2.0), (6, 2.5)):
        if evaluated_first:
            saved.best.mtb_evaluated(step, loss)
        saved.publish(step)
        if not evaluated_first:
            saved.best.mtb_evaluated(step, loss)
    assert saved.kept == ["step_00000004"]
    saved.best.mtb_evaluated(8, float("nan"))
    saved.publish(8)
    assert saved.kept == ["step_00000004"]


def test_a_run_that_went_back(saved: Saved) -> None:
    """A step that was evaluated before is another one now: its old loss says nothing of the new checkpoint."""
    saved.best.mtb_evaluated(4, 1.0)
    saved.best.mtb_phase("load", 5)
    saved.publish(4)
    assert saved.kept == []
    saved.best.mtb_evaluated(4, 2.0)
    assert saved.best.mtb_result() == {"checkpoint": "best/step_00000004", "step": 4, "eval_loss": 2.0}


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_between_losses_and_checkpoint(saved: Saved, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run knows the loss of the checkpoint that is there, the old one or the new."""
    saved.publish(2)
    saved.best.mtb_evaluated(2, 3.0)
    saved.publish(4)
    keep = best.keep_checkpoint

    def crash(*arguments: Path) -> Path:
        if moment == "after":
            keep(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(best, "keep_checkpoint", crash)
    with pytest.raises(KeyboardInterrupt):
        saved.best.mtb_evaluated(4, 2.0)
    monkeypatch.undo()
    found = saved.started().mtb_result()
    assert found is not None
    assert (found["step"], found["eval_loss"]) == ((2, 3.0) if moment == "before" else (4, 2.0))


def test_two_left_by_a_crash(saved: Saved) -> None:
    """The better one is taken, and is the only one after the next."""
    for step, loss in ((2, 2.0), (4, 3.0)):
        saved.publish(step)
        saved.best = saved.started() if step == 2 else Best(BestOptions(min_delta=-9.0))
        saved.best.mtb_run_started(saved.info)
        saved.publish(step)
        if step == 4:
            shutil.copytree(saved.folder / "best" / "step_00000002", saved.folder / "spare")
        saved.best.mtb_evaluated(step, loss)
    (saved.folder / "spare").rename(saved.folder / "best" / "step_00000002")
    guard = saved.best = saved.started()
    found = guard.mtb_result()
    assert found is not None
    assert found["step"] == 2
    saved.publish(6)
    guard.mtb_evaluated(6, 1.0)
    assert saved.kept == ["step_00000006"]


def test_a_copy_that_fails_does_not_end_the_training(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told in the result, what was kept before stays, and a later one may be kept."""
    saved.publish(2)
    saved.best.mtb_evaluated(2, 3.0)

    def refuse(*_: Path) -> Path:
        raise OSError(28, "No space left on device", "best")

    with monkeypatch.context() as patch:
        patch.setattr(best, "keep_checkpoint", refuse)
        saved.publish(4)
        saved.best.mtb_evaluated(4, 2.0)
    found = saved.best.mtb_result()
    assert found is not None
    assert "step 4 could not be kept" in found["failed"]
    assert saved.kept == ["step_00000002"]
    saved.publish(6)
    saved.best.mtb_evaluated(6, 1.0)
    assert saved.kept == ["step_00000006"]


def test_only_rank_0_keeps(saved: Saved) -> None:
    """Other ranks do nothing."""
    other = saved.started(ctx=attrs.evolve(saved.info.ctx, rank=1))
    other.mtb_phase("step", 2)
    assert not saved.control.take().save
    saved.publish(2)
    other.mtb_checkpoint_published(saved.folder / "step_00000002", 2)
    other.mtb_evaluated(2, 1.0)
    assert saved.kept == []
    assert other.mtb_result() is None
    assert json.loads("[]") == []
