"""The same global batch gives the same training under every strategy, world size, accumulation and sync mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtb_core import TrainConfig
from mtb_kit.recording import RankRecord, run_recorded

COMMON = {
    "seq_length": 16,
    "vocab_size": 64,
    "d_model": 32,
    "n_heads": 2,
    "n_layers": 2,
    "global_batch_size": 12,
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "steps": 18,
    "max_grad_norm": 0.5,
    "device": "cpu",
}
OPTIMIZERS = {"adamw": {"optimizer": "adamw", "adam_eps": 1e-6}, "sgd": {"optimizer": "sgd", "learning_rate": 0.1}}

CASES = {
    "single-accumulate": {"strategy": "single", "grad_accum_steps": 4},
    "ddp-1": {"strategy": "ddp", "nproc": 1},
    "ddp-2": {"strategy": "ddp", "nproc": 2},
    "ddp-2-every-accumulate": {"strategy": "ddp", "nproc": 2, "grad_accum_steps": 3, "gradient_sync_mode": "every"},
    "ddp-3-accumulate": {"strategy": "ddp", "nproc": 3, "grad_accum_steps": 4},
    "ddp-2-zero1": {"strategy": "ddp", "nproc": 2, "strategy_opt": {"zero1": True}},
    "ddp-3-no-view": {"strategy": "ddp", "nproc": 3, "strategy_opt": {"gradient_as_bucket_view": False}},
    "ddp-2-small-buckets": {"strategy": "ddp", "nproc": 2, "strategy_opt": {"bucket_cap_mb": 1}},
    "ddp-2-static": {"strategy": "ddp", "nproc": 2, "strategy_opt": {"static_graph": True}},
    "ddp-2-find-unused": {"strategy": "ddp", "nproc": 2, "strategy_opt": {"find_unused_parameters": True}},
    "ddp-2-checkpointing": {"strategy": "ddp", "nproc": 2, "activation_checkpointing": True, "grad_accum_steps": 2},
}

_references: dict[str, RankRecord] = {}


def reference(optimizer: str, folder: Path) -> RankRecord:
    """`single`, in one micro-batch a step."""
    if optimizer not in _references:
        config = TrainConfig(**{**COMMON, **OPTIMIZERS[optimizer]})
        _references[optimizer] = run_recorded(config, folder)[1][0]
    return _references[optimizer]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, optimizer: str, tmp_path: Path) -> None:
    """Losses agree to 1e-5 and weights, per tensor, to 1e-5 of their norm, with those of `single`."""
    expected = reference(optimizer, tmp_path / "reference")
    config = TrainConfig(**{**COMMON, **OPTIMIZERS[optimizer], **CASES[case]})
    result, ranks = run_recorded(config, tmp_path / "case")
    assert result.exit_reason == "done"
    assert len(ranks) == config.nproc
    assert expected.records[0].clipped
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-5)
        assert [r.grad_norm for r in rank.records] == pytest.approx([r.grad_norm for r in expected.records], rel=1e-4)
        assert rank.initial.keys() == expected.initial.keys()
        for name, weight in expected.initial.items():
            assert torch.equal(rank.initial[name], weight), name
        for name, weight in expected.final.items():
            distance = (rank.final[name] - weight).norm() / weight.norm().clamp(min=1e-12)
            assert distance <= 1e-5, name
    assert expected.losses[-1] < expected.losses[0]


@pytest.mark.parametrize(("mode", "count"), [("last", 1), ("every", 4)])
def test_gradient_synchronisations(mode: str, count: int, tmp_path: Path) -> None:
    """`last` reduces each gradient element once a step, `every` once a micro-batch, counted on real collectives."""
    config = TrainConfig(
        **{**COMMON, "strategy": "ddp", "nproc": 2, "global_batch_size": 8, "grad_accum_steps": 4},
        gradient_sync_mode=mode,
    )
    result, _ = run_recorded(config, tmp_path)
    assert result.collectives_per_step == {"all_reduce": count, "agreement": 1}
    assert result.comm_bytes_per_step is not None
    assert result.comm_bytes_per_step["all_reduce"] == count * result.parameters * 4
    assert result.synchronized_microbatches_per_step == count
