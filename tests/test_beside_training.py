"""Trial forwards and evaluations change nothing of training, and every trial and rank begins with the model that it says."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mtb_core import ModelSpec, TrainConfig, run
from mtb_core.model.aside import undisturbed
from mtb_core.train.building import ModelBuild

MODELS = Path(__file__).parent / "models" / "drawing.py"
TINY = {
    "vocab_size": 256,
    "seq_length": 8,
    "batch_size": 2,
    "warmup_steps": 0,
    "device": "cpu",
    "sink": (),
}


def trained(folder: Path, model: str, **settings: Any) -> Any:
    return run(TrainConfig(**{**TINY, "model": f"{MODELS}:{model}", "run_dir": str(folder), **settings}), quiet=True)


class Parts(nn.Module):
    """A frozen part in eval mode, and buffers that a forward writes to, replaces, and that are expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Dropout(), nn.BatchNorm1d(2).eval()
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("expanded", torch.zeros(1).expand(3))

    def forward(self) -> None:
        self.written += 1
        self.replaced = self.replaced + 1
        torch.rand(1), np.random.rand(), random.random()


def test_modes_buffers_and_streams_come_back() -> None:
    """After the block all is as before it: each module's own mode, the tensors and their values, all four streams."""
    parts = Parts()
    replaced = parts.replaced
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = (torch.rand(1).item(), np.random.rand(), random.random())
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    with undisturbed(parts, "cpu"):
        assert not any(module.training for module in parts.modules())
        parts()
    assert (parts.training, parts.trained.training, parts.frozen.training) == (True, True, False)
    assert parts.replaced is replaced
    assert torch.equal(torch.stack([parts.written, parts.replaced]), torch.zeros(2, 2))
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def test_a_loss_that_draws_resumes_exactly(tmp_path: Path) -> None:
    """A model with dropout in its own loss goes on with the numbers that it would have drawn, evaluations or not."""
    whole = trained(tmp_path / "whole", "DrawsInItsLoss", until_step=4)
    first = {"save_every": 2, "checkpoint_dir": str(tmp_path / "saved")}
    trained(tmp_path / "first", "DrawsInItsLoss", until_step=2, **first)
    evaluated = {"eval_every": 1, "eval_data": str(MODELS)}
    second = trained(tmp_path / "second", "DrawsInItsLoss", until_step=4, resume="latest", **first, **evaluated)
    assert second.exit_reason == "done", second.failure
    assert second.runtime["resume_deterministic"]
    assert second.loss == whole.loss


def test_frozen_statistics_stay(tmp_path: Path) -> None:
    """A part that its author has put into eval mode is trained around: its statistics never move."""
    done = trained(tmp_path, "FrozenStatistics", steps=2, eval_every=1, eval_data=str(MODELS))
    assert done.exit_reason == "done", done.failure  # the model's forward looks at its mode


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_numpy_and_python_are_seeded_for_the_model(tmp_path: Path, method: str) -> None:
    """Weights drawn from numpy and python follow from the seed, on every rank and in every process."""
    settings = {"strategy": "ddp", "nproc": 2, "start_method": method, "steps": 1, "seed": 5}
    losses = [trained(tmp_path / str(i), "DrawsFromAll", **settings).check().loss_first for i in range(2)]
    assert losses[0] == losses[1]


def test_ranks_that_begin_unlike_are_refused(tmp_path: Path) -> None:
    """The first tensor that differs is named, on all ranks, before the first step."""
    failed = trained(tmp_path, "OfItsProcess", strategy="ddp", nproc=2, steps=1)
    assert failed.exit_reason == "failed"
    assert "other numbers on rank 1 than on rank 0, 'head.bias' first" in failed.failure["text"]


def test_a_model_is_trained_in_one_trial_only(tmp_path: Path) -> None:
    """A factory that returns one object cannot give independent trials."""
    assert trained(tmp_path / "one", "one", steps=1).exit_reason == "done"
    failed = trained(tmp_path / "two", "one", steps=1, repeat=2)
    assert "that an earlier trial has trained" in failed.failure["text"]


def test_a_model_that_the_strategy_has_taken_apart_is_let_go() -> None:
    """Of a model that does not fit as a whole a strategy keeps a part, and nothing else keeps the rest."""
    plan = SimpleNamespace(tied_weights=True)
    resolved = SimpleNamespace(config=SimpleNamespace(seed=0, strategy="x"), plan=plan)
    ctx = SimpleNamespace(device="cpu", world_size=1, backend=None)
    built: Any = ModelBuild(ModelSpec(build=lambda: nn.Linear(2, 2)), resolved, ctx)  # type: ignore[arg-type]
    model = weakref.ref(built())
    gc.collect()
    assert model() is None
    assert built.parameters == 6
    built.used_up()
