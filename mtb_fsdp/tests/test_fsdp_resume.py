"""Sharded checkpoints: resuming to the bit, and resharding between strategies and world sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .whole import after, before, same, train

CASES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "ddp-2": {"strategy": "ddp", "nproc": 2},
    "ddp-3": {"strategy": "ddp", "nproc": 3},
    "fsdp-1": {"strategy": "fsdp"},
    "fsdp-2": {"strategy": "fsdp", "nproc": 2},
    "fsdp-3": {"strategy": "fsdp", "nproc": 3},
    "fsdp-3-root": {"strategy": "fsdp", "nproc": 3, "strategy_opt": {"wrap": "root"}},
    "fsdp-3-accumulate": {"strategy": "fsdp", "nproc": 3, "grad_accum_steps": 2},
    "fsdp-3-last": {"strategy": "fsdp", "nproc": 3, "grad_accum_steps": 2, "gradient_sync_mode": "last"},
    "fsdp-2-bf16": {"strategy": "fsdp", "nproc": 2, "precision": "bf16"},
    "fsdp-2-sgd": {"strategy": "fsdp", "nproc": 2, "optimizer": "sgd", "momentum": 0.9},
    "fsdp-2-offload": {"strategy": "fsdp", "nproc": 2, "strategy_opt": {"cpu_offload": True}},
    "fsdp-4-hsdp": {"strategy": "fsdp", "nproc": 4, "strategy_opt": {"hsdp": 2}},
    "fsdp1-1": {"strategy": "fsdp1"},
    "fsdp1-2": {"strategy": "fsdp1", "nproc": 2},
    "fsdp1-3": {"strategy": "fsdp1", "nproc": 3},
    "fsdp1-2-none": {"strategy": "fsdp1", "nproc": 2, "strategy_opt": {"sharding": "none"}},
    "fsdp1-3-last": {"strategy": "fsdp1", "nproc": 3, "grad_accum_steps": 2, "gradient_sync_mode": "last"},
    "fsdp1-2-bf16": {"strategy": "fsdp1", "nproc": 2, "precision": "bf16"},
}
SETTINGS: dict[str, Any] = {
    "dropout": 0.2,
    "lr_scheduler": "cosine",
    "lr_decay_steps": 8,
    "warmup_steps": 0,
    "steps": None,
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("fsdp-1", marks=pytest.mark.slow),
        pytest.param("fsdp-2", marks=pytest.mark.slow),
        "fsdp-3-accumulate",
        pytest.param("fsdp-3-last", marks=pytest.mark.slow),
        pytest.param("fsdp-2-bf16", marks=pytest.mark.slow),
        pytest.param("fsdp-2-sgd", marks=pytest.mark.slow),
        pytest.param("fsdp-2-offload", marks=pytest.mark.slow),
        pytest.param("fsdp-4-hsdp", marks=pytest.mark.slow),
        pytest.param("fsdp1-1", marks=pytest.mark.slow),
        "fsdp1-3",
        pytest.param("fsdp1-3-last", marks=pytest.mark.slow),
        pytest.param("fsdp1-2-none", marks=pytest.mark.slow),
        pytest.param("fsdp1-2-bf16", marks=pytest.mark.slow),
    ],
)
def test_resume_is_bitwise(case: str, tmp_path: Path) -> None:
    """Stopped at 2 and resumed: losses, norms, weights and optimizer state are those of the uninterrupted run."""
    settings = {**SETTINGS, **CASES[case]}
    _, expected = train(tmp_path / "whole", **settings, until_step=5)
    saving = {"checkpoint_dir": str(tmp_path / "saved"), "save_every": 2}
    _, first = train(tmp_path / "first", **settings, **saving, until_step=2)
    result, second = train(tmp_path / "second", **settings, **saving, until_step=5, resume="latest")
    assert result.runtime["resume_deterministic"] is True, result.runtime
    assert same(after(first), before(second))
    for begun, resumed, uninterrupted in zip(first, second, expected, strict=True):
        assert begun.losses + resumed.losses == uninterrupted.losses
        assert [r.grad_norm for r in resumed.records] == [r.grad_norm for r in uninterrupted.records[2:]]
    assert same(after(second), after(expected))


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "tied"])
@pytest.mark.parametrize(
    ("saver", "resumers"),
    [
        ("single", ("fsdp-1", "fsdp-2", "fsdp-3", "fsdp1-2", "fsdp1-3")),
        pytest.param("ddp-2", ("fsdp-3", "fsdp1-3"), marks=pytest.mark.slow),
        pytest.param("fsdp-2", ("single", "ddp-3", "fsdp-1", "fsdp-3-root", "fsdp1-3"), marks=pytest.mark.slow),
        ("fsdp-3", ("single", "ddp-2", "fsdp-2", "fsdp1-2")),
        pytest.param("fsdp-4-hsdp", ("single", "fsdp-3"), marks=pytest.mark.slow),
        pytest.param("fsdp1-2", ("single", "fsdp-3", "fsdp1-3", "fsdp1-2-none"), marks=pytest.mark.slow),
        ("fsdp1-3", ("single", "ddp-2", "fsdp-2", "fsdp1-1", "fsdp1-2")),
    ],
)
def test_resharding_is_exact(saver: str, resumers: tuple[str, ...], tied: bool, tmp_path: Path) -> None:
    """Whoever loads a checkpoint has the model and the optimizer state of the saver, to the bit, and goes on alike."""
    settings = {"warmup_steps": 0, "steps": None, "tie_embeddings": tied, "adam_eps": 1e-6}
    saving = {"checkpoint_dir": str(tmp_path / "saved"), "save_every": 2}
    _, expected = train(tmp_path / "whole", **settings, **CASES[saver], until_step=4)
    _, saved = train(tmp_path / "first", **settings, **CASES[saver], **saving, until_step=2)
    path = str(tmp_path / "saved" / "step_00000002")
    state = after(saved)
    assert any(key.startswith("optim/") for key in state)
    for resumer in resumers:
        result, seen = train(tmp_path / resumer, **settings, **CASES[resumer], until_step=4, resume=path)
        assert same(state, before(seen)), resumer
        assert result.runtime["resumed"] is True
        assert seen[0].losses == pytest.approx(expected[0].losses[2:], rel=1e-5), resumer
