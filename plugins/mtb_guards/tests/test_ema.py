"""Run plugin ``ema``: the same average under every strategy, to the bit where it is saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import DDP, Guarded, tensors

STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "ddp": DDP,
    "zero1": {**DDP, "strategy_opt": {"zero1": True}},
    "fsdp": {"strategy": "fsdp", "nproc": 2},
    "fsdp-bf16": {"strategy": "fsdp", "nproc": 3, "precision": "bf16"},
    "fsdp1": {"strategy": "fsdp1", "nproc": 2},
    "tp": {"strategy": "tp", "nproc": 2},
    "deepspeed-1": {"strategy": "deepspeed", "nproc": 2, "strategy_opt": {"stage": 1}},
    "deepspeed-2-bf16": {"strategy": "deepspeed", "nproc": 2, "strategy_opt": {"stage": 2}, "precision": "bf16"},
    "deepspeed-3-bf16": {"strategy": "deepspeed", "nproc": 2, "strategy_opt": {"stage": 3}, "precision": "bf16"},
}
SLOW = ("zero1", "fsdp-bf16", "fsdp1", "deepspeed-1", "deepspeed-2-bf16")
CASES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in STRATEGIES]
OWN = "plugins/ema/model/"


@pytest.mark.parametrize("name", CASES)
def test_the_average_follows_the_weights(name: str, tmp_path: Path) -> None:
    """Begun in a resumed run, it starts from the loaded weights; then each update moves it by 1 - decay, and no more."""
    guarded, strategy = Guarded(tmp_path), STRATEGIES[name]
    guarded.run("before", {}, **strategy, **guarded.saving(), until_step=1)
    result, _ = guarded.run("run", {"ema.decay": 0.75}, **strategy, **guarded.saving(), until_step=4, resume="latest")
    assert result.exit_reason == "done", result.failure
    assert result.plugin_results["ema"] == {"decay": 0.75, "updates": 3}
    expected = tensors(guarded.checkpoint(1), "model/")
    for step in (2, 3, 4):
        weights = tensors(guarded.checkpoint(step), "model/")
        expected = {key: average.lerp(weights[key], 0.25) for key, average in expected.items()}
        found = tensors(guarded.checkpoint(step), OWN)
        assert found.keys() == expected.keys()
        for key, average in expected.items():
            torch.testing.assert_close(found[key], average, rtol=1e-6, atol=1e-8)
            assert not torch.equal(found[key], weights[key])


@pytest.mark.parametrize("name", CASES)
def test_evaluating_with_the_average(name: str, tmp_path: Path) -> None:
    """With decay 1 that is the model as it began, at every evaluation; training goes on as if nothing had been."""
    guarded, strategy = Guarded(tmp_path), STRATEGIES[name]
    evaluation = {"eval_data": guarded.data("eval", 64, 128), "eval_every": 1, "until_step": 4, "max_grad_norm": 0.5}
    _, plain = guarded.run("plain", {}, **strategy, **evaluation)
    guards = {"ema.decay": 1.0, "ema.evaluate": True}
    result, ranks = guarded.run("run", guards, **strategy, **evaluation)
    assert result.exit_reason == "done", result.failure
    assert [rank.losses for rank in ranks] == [rank.losses for rank in plain]
    for left, right in zip(ranks, plain, strict=True):
        assert all(torch.equal(left.final[key], right.final[key]) for key in right.final)
    losses = [loss for _, loss in guarded.evaluations("run")]
    assert len(losses) == 4
    assert len(set(losses)) == 1
    assert losses[0] not in [loss for _, loss in guarded.evaluations("plain")]


@pytest.mark.parametrize("name", ["single", "fsdp"])
def test_resuming_is_bitwise(name: str, tmp_path: Path) -> None:
    """Stopped and resumed, the average is that of the uninterrupted run."""
    guarded, strategy, guards = Guarded(tmp_path), STRATEGIES[name], {"ema.decay": 0.9}
    guarded.run("whole", guards, **strategy, **guarded.saving(6), until_step=6)
    whole = tensors(guarded.checkpoint(6), OWN)
    guarded = Guarded(tmp_path / "parts")
    guarded.folder.mkdir()
    guarded.run("first", guards, **strategy, **guarded.saving(3), until_step=3)
    result, _ = guarded.run("rest", guards, **strategy, **guarded.saving(3), until_step=6, resume="latest")
    assert result.plugin_results["ema"]["updates"] == 6
    found = tensors(guarded.checkpoint(6), OWN)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], whole[key]) for key in whole)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("fsdp", {"strategy": "fsdp", "nproc": 3}),
        ("fsdp", {"strategy": "single", "nproc": 1}),
        ("deepspeed-3-bf16", {"strategy": "tp", "nproc": 2, "strategy_opt": {}}),
        pytest.param("tp", {"strategy": "deepspeed", "nproc": 3, "strategy_opt": {"stage": 3}}, marks=pytest.mark.slow),
        pytest.param("single", {"strategy": "fsdp1", "nproc": 3}, marks=pytest.mark.slow),
    ],
)
def test_resharding_is_bitwise(saved: str, loaded: dict[str, Any], tmp_path: Path) -> None:
    """Another number of ranks and another strategy load the same average: with decay 1 it is saved again as it was."""
    guarded, strategy = Guarded(tmp_path), STRATEGIES[saved]
    guarded.run("first", {"ema.decay": 0.5}, **strategy, **guarded.saving(3), until_step=3)
    after = {**strategy, **loaded}
    result, _ = guarded.run("rest", {"ema.decay": 1.0}, **after, **guarded.saving(4), until_step=4, resume="latest")
    assert result.exit_reason == "done", result.failure
    before, now = tensors(guarded.checkpoint(3), OWN), tensors(guarded.checkpoint(4), OWN)
    assert before.keys() == now.keys()
    assert all(torch.equal(before[key], now[key]) for key in before)


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    """A run without it resumes from a checkpoint that has its tensors, and saves none."""
    guarded = Guarded(tmp_path)
    guarded.run("first", {"ema.decay": 0.5}, **guarded.saving(2), until_step=2)
    assert tensors(guarded.checkpoint(2), OWN)
    result, _ = guarded.run("rest", {}, **guarded.saving(2), until_step=4, resume="latest")
    assert (result.exit_reason, result.runtime["resume_deterministic"]) == ("done", True)
    assert not tensors(guarded.checkpoint(4), "plugins/")


def test_it_goes_back_with_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To the average of the checkpoint; and to its weights where that is older than the average."""
    from mtb_core import RunInfo, StepRecord, hookimpl

    class Back:
        @hookimpl
        def mtb_run_started(self, info: RunInfo) -> None:
            self._control, self._asked = info.control, False

        @hookimpl
        def mtb_step_recorded(self, record: StepRecord) -> None:
            if record.global_step == 4 and not self._asked:
                self._asked = True
                assert self._control is not None
                self._control.roll_back("back", before=4 if record.samples_seen == 41 else 99, leave_out=0)

    guarded, guards = Guarded(tmp_path), {"ema.decay": 0.75}
    plugins = {"back": Back}
    guarded.run("before", {}, **guarded.saving(2), until_step=2)
    result, _ = guarded.run("run", guards, plugins=plugins, **guarded.saving(8), until_step=5, resume="latest")
    assert [action["to"] for action in result.runtime["actions"]] == [2]
    assert result.plugin_results["ema"]["updates"] == 3
    assert "holds nothing of plugin 'ema', which begins anew" in caplog.text
    again = Guarded(tmp_path / "again")
    again.folder.mkdir()
    again.run("whole", guards, **again.saving(5), until_step=5)
    with_average = Guarded(tmp_path / "with")
    with_average.folder.mkdir()
    result, _ = with_average.run("run", guards, plugins=plugins, **with_average.saving(2), until_step=5)
    assert [action["to"] for action in result.runtime["actions"]] == [2]
    left, right = (tensors(each.checkpoint(5), OWN) for each in (again, with_average))
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_frozen_parameters_have_no_average(tmp_path: Path) -> None:
    """Only what is trained is averaged, and an update that was left out moves nothing."""
    from mtb_core import hookimpl

    class LeavesOut:
        @hookimpl
        def mtb_before_update(self, step: int) -> str | None:
            return "left out" if step == 2 else None

    model = tmp_path / "frozen.py"
    model.write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Embedding(256, 16), nn.Linear(16, 256))\n"
        "        self[0].requires_grad_(False)\n"
    )
    guarded = Guarded(tmp_path)
    settings = {"model": f"{model}:Net", **guarded.saving()}
    guarded.run("run", {"ema.decay": 0.5}, plugins={"leaves": LeavesOut}, **settings, until_step=2)
    averages = [tensors(guarded.checkpoint(step), OWN) for step in (1, 2)]
    assert set(averages[0]) == {"1.weight", "1.bias"}
    assert all(torch.equal(averages[0][key], averages[1][key]) for key in averages[0])
