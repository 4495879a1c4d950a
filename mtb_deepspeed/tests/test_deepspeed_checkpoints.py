"""Checkpoints of core hold ZeRO's state in global coordinates: exact resume, other numbers of ranks, other strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .odd_models import VOCABULARY
from .recorded import Recorded, recorded

STAGE_3 = {"stage": 3, "param_persistence_threshold": 0}


def leg(folder: Path, until: int, *, start: bool = False, **settings: Any) -> Recorded:
    """Train to step `until` from the newest checkpoint in `folder`, and save there."""
    asked = {"steps": None, "until_step": until, "save_every": until, "checkpoint_dir": str(folder / "checkpoints")}
    if not start:
        asked |= {"resume": "latest", "warmup_steps": 0}
    return recorded(folder / f"until{until}", **{**asked, **settings})


def distance(found: Recorded, expected: Recorded) -> float:
    """The largest difference of a tensor of the final state, relative to its norm."""
    assert found.final.keys() == expected.final.keys()
    return max(
        float((found.final[key] - value).norm() / value.norm().clamp(min=1e-12))
        for key, value in expected.final.items()
    )


EXACT: dict[str, dict[str, Any]] = {
    "stage 0": {"strategy_opt": {"stage": 0}, "nproc": 2},
    "stage 1, momentum": {
        "strategy_opt": {"stage": 1},
        "nproc": 3,
        "grad_accum_steps": 2,
        "optimizer": "sgd",
        "momentum": 0.9,
        "adam_eps": 1e-8,
    },
    "stage 2, bf16": {"strategy_opt": {"stage": 2}, "nproc": 2, "precision": "bf16", "grad_accum_steps": 2},
    "stage 3, dropout": {"strategy_opt": STAGE_3, "nproc": 3, "dropout": 0.1},
    "stage 3, bf16, persistent": {"strategy_opt": {"stage": 3}, "nproc": 2, "precision": "bf16"},
    "stage 2, offloaded": {"strategy_opt": {"stage": 2, "offload_optimizer": "cpu"}, "nproc": 2},
}


@pytest.mark.parametrize(
    "case", ["stage 3, dropout", *(pytest.param(c, marks=pytest.mark.slow) for c in EXACT if c != "stage 3, dropout")]
)
def test_resume_is_exact(case: str, tmp_path: Path) -> None:
    """A resumed run ends with the losses, weights and moments of the uninterrupted one, to the bit."""
    settings = {"strategy": "deepspeed", "lr_scheduler": "cosine", "lr_decay_steps": 8, **EXACT[case]}
    expected = recorded(tmp_path / "whole", steps=7, **settings)
    leg(tmp_path, 3, start=True, **settings)
    found = leg(tmp_path, 8, **settings)
    assert found.result.runtime["resume_deterministic"] is True
    assert found.losses == expected.losses[3:]
    for key, value in expected.final.items():
        assert torch.equal(found.final[key], value), key


CHAINS: dict[str, list[dict[str, Any]]] = {
    "stage 2 on 2, 3, 1 ranks": [
        {"strategy": "deepspeed", "nproc": nproc, "strategy_opt": {"stage": 2}} for nproc in (2, 3, 1)
    ],
    "stage 3 on 3, 2, 1 ranks": [
        {"strategy": "deepspeed", "nproc": nproc, "strategy_opt": STAGE_3} for nproc in (3, 2, 1)
    ],
    "single, stage 1, stage 3": [
        {"strategy": "single"},
        {"strategy": "deepspeed", "nproc": 2, "strategy_opt": {"stage": 1}},
        {"strategy": "deepspeed", "nproc": 3, "strategy_opt": STAGE_3},
    ],
    "stage 3, ddp, stage 0": [
        {"strategy": "deepspeed", "nproc": 2, "strategy_opt": STAGE_3},
        {"strategy": "ddp", "nproc": 3},
        {"strategy": "deepspeed", "nproc": 2, "strategy_opt": {"stage": 0}},
    ],
    "fsdp, stage 2, fsdp": [
        {"strategy": "fsdp", "nproc": 3},
        {"strategy": "deepspeed", "nproc": 2, "strategy_opt": {"stage": 2}},
        {"strategy": "fsdp", "nproc": 2},
    ],
    "stage 1, stage 3, single": [
        {"strategy": "deepspeed", "nproc": 3, "strategy_opt": {"stage": 1}},
        {"strategy": "deepspeed", "nproc": 2, "strategy_opt": STAGE_3},
        {"strategy": "single"},
    ],
}


@pytest.mark.parametrize(
    "chain",
    [
        "single, stage 1, stage 3",
        *(pytest.param(c, marks=pytest.mark.slow) for c in CHAINS if c != "single, stage 1, stage 3"),
    ],
)
def test_training_goes_on_elsewhere(chain: str, tmp_path: Path) -> None:
    """Losses, weights and moments of a training that moves are those of `single` all along."""
    expected = recorded(tmp_path / "whole", strategy="single", steps=8)
    losses: list[float] = []
    for index, settings in enumerate(CHAINS[chain]):
        found = leg(tmp_path, 3 * (index + 1), start=index == 0, **settings)
        losses += found.losses
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.final.keys() == expected.final.keys()
    assert distance(found, expected) < 1e-4


def test_frozen_parameters_arrive(tmp_path: Path) -> None:
    """What is not trained is the checkpoint's too, also where it stays gathered: with another seed, losses go on alike."""
    odd = {"model": f"{Path(__file__).parent / 'odd_models.py'}:Frozen", "vocab_size": VOCABULARY, "precision": "bf16"}
    leg(tmp_path, 3, start=True, strategy="single", **odd)
    asked = {"until_step": 5, "steps": None, "warmup_steps": 0, "resume": "latest", **odd}
    asked |= {"checkpoint_dir": str(tmp_path / "checkpoints"), "seed": 1, "allow_config_change": ("seed",)}
    expected = recorded(tmp_path / "single", strategy="single", **asked)
    found = recorded(tmp_path / "zero", strategy="deepspeed", strategy_opt={"stage": 3}, nproc=2, **asked)
    assert found.losses == pytest.approx(expected.losses, rel=5e-3)
    assert torch.equal(found.final["model/frozen.weight"], expected.final["model/frozen.weight"])


@pytest.mark.slow
def test_bf16_keeps_its_precision_elsewhere(tmp_path: Path) -> None:
    """What bf16 training saves are fp32 weights and moments; they arrive unrounded at other stages and strategies."""
    first = leg(tmp_path, 3, start=True, strategy="deepspeed", nproc=2, precision="bf16", strategy_opt={"stage": 2})
    for index, settings in enumerate(
        [
            {"strategy": "deepspeed", "nproc": 3, "strategy_opt": STAGE_3},
            {"strategy": "deepspeed", "nproc": 2, "strategy_opt": {"stage": 0}},
            {"strategy": "single"},
        ]
    ):
        found = recorded(
            tmp_path / str(index),
            precision="bf16",
            until_step=4,
            steps=None,
            warmup_steps=0,
            checkpoint_dir=str(tmp_path / "checkpoints"),
            resume="latest",
            **settings,
        )
        for key, value in first.final.items():
            assert torch.equal(found.initial[key], value), (key, settings)
