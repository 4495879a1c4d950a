"""Every ZeRO stage trains as one rank without DeepSpeed does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .recorded import Recorded, recorded

_references: dict[str, Recorded] = {}

VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {},
    # At a rate of 0.05 and more, `single` that accumulates differs by rounding from `single` that does not by half of
    # what is allowed here, and three ranks of any strategy by up to all of it.
    "momentum": {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.04, "adam_eps": 1e-8},
    "bf16": {"precision": "bf16"},
}


def reference(variant: str, folder: Path) -> Recorded:
    """`single`, in one micro-batch a step."""
    if variant not in _references:
        _references[variant] = recorded(folder / "reference", strategy="single", **VARIANTS[variant])
    return _references[variant]


def check(found: Recorded, expected: Recorded, *, weights: float) -> None:
    """Losses, norms, weights and moments agree; the weights that training starts from are the same to the bit."""
    for records in found.records:
        assert [r.loss for r in records] == pytest.approx(expected.losses, rel=1e-5)
        assert [r.grad_norm for r in records] == pytest.approx([r.grad_norm for r in expected.records[0]], rel=1e-4)
    assert found.initial.keys() == expected.initial.keys()
    assert found.final.keys() == expected.final.keys()
    for key, value in expected.initial.items():
        assert torch.equal(found.initial[key], value), key
    for key, value in expected.final.items():
        distance = (found.final[key].float() - value.float()).norm() / value.float().norm().clamp(min=1e-12)
        assert distance <= (weights if key.startswith("model/") else 1e-4), (key, distance)
    assert expected.records[0][0].clipped
    assert expected.losses[-1] < expected.losses[0]


CASES: dict[str, dict[str, Any]] = {
    "stage 0, 2 ranks": {"strategy_opt": {"stage": 0}, "nproc": 2},
    "stage 1, 2 ranks, accumulating": {"strategy_opt": {"stage": 1}, "nproc": 2, "grad_accum_steps": 3},
    "stage 2, 3 ranks, accumulating": {"strategy_opt": {"stage": 2}, "nproc": 3, "grad_accum_steps": 4},
    "stage 3, 2 ranks": {"strategy_opt": {"stage": 3}, "nproc": 2},
    "stage 3, 3 ranks, accumulating, nothing kept": {
        "strategy_opt": {"stage": 3, "param_persistence_threshold": 0},
        "nproc": 3,
        "grad_accum_steps": 4,
    },
    "stage 2, 1 rank": {"strategy_opt": {"stage": 2}},
    "stage 2, small buckets, overlapping": {
        "strategy_opt": {"stage": 2, "reduce_bucket_size": 500, "allgather_bucket_size": 400, "overlap_comm": True},
        "nproc": 2,
        "grad_accum_steps": 2,
    },
    "stage 2, scattered gradients": {"strategy_opt": {"stage": 2, "contiguous_gradients": False}, "nproc": 2},
    "stage 1, offloaded": {"strategy_opt": {"stage": 1, "offload_optimizer": "cpu"}, "nproc": 2, "grad_accum_steps": 2},
    "stage 2, offloaded": {"strategy_opt": {"stage": 2, "offload_optimizer": "cpu"}, "nproc": 2, "grad_accum_steps": 2},
    "stage 3, offloaded": {"strategy_opt": {"stage": 3, "offload_optimizer": "cpu"}, "nproc": 2, "grad_accum_steps": 2},
    "stage 3, all-reduce, activation checkpointing": {
        "strategy_opt": {"stage": 3, "reduce_scatter": False, "param_persistence_threshold": 0},
        "nproc": 2,
        "activation_checkpointing": True,
    },
}


#: One a stage; the others, and all of the other optimizers and precisions but one, take longer than is usual.
FAST = (
    "stage 1, 2 ranks, accumulating",
    "stage 2, 3 ranks, accumulating",
    "stage 3, 3 ranks, accumulating, nothing kept",
)


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_fp32_parity(case: str, tmp_path: Path) -> None:
    """In fp32 losses agree to 1e-5 over 20 steps, weights and moments, per tensor, to 1e-4 of their norm."""
    found = recorded(tmp_path, strategy="deepspeed", **CASES[case])
    check(found, reference("adamw", tmp_path), weights=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sgd_parity(stage: int, tmp_path: Path) -> None:
    """With SGD, which shows factors that AdamW hides, weights and momentum agree as well."""
    found = recorded(tmp_path, strategy="deepspeed", nproc=3, strategy_opt={"stage": stage}, **VARIANTS["momentum"])
    check(found, reference("momentum", tmp_path), weights=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"stage": 0}, marks=pytest.mark.slow),
        pytest.param({"stage": 1}, marks=pytest.mark.slow),
        {"stage": 2},
        pytest.param({"stage": 2, "grad_accum_dtype": "fp32"}, marks=pytest.mark.slow),
        pytest.param({"stage": 3, "param_persistence_threshold": 0}, marks=pytest.mark.slow),
        pytest.param({"stage": 3, "grad_accum_dtype": "fp32"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bf16_parity(options: dict[str, Any], tmp_path: Path) -> None:
    """In bf16 losses agree to 2e-2, and what is kept of the weights has the precision of fp32 from the start."""
    found = recorded(
        tmp_path, strategy="deepspeed", nproc=2, grad_accum_steps=2, precision="bf16", strategy_opt=options
    )
    expected = reference("bf16", tmp_path)
    assert found.losses == pytest.approx(expected.losses, rel=2e-2)
    assert all(value.dtype == torch.float32 for value in found.final.values())
    for key, value in expected.initial.items():
        assert torch.equal(found.initial[key], value), key
    assert any(not torch.equal(value, value.bfloat16().float()) for value in found.initial.values())
    assert found.losses[-1] < found.losses[0]
