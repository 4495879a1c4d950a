"""Strategy `cp` communicates while backward runs, and sums gradients as strategies `ddp` and `fsdp` do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cp_states import TINY

from mtb_core import Result, TrainConfig, run
from mtb_kit.launches import run_launches

LAYERS = 6
#: Gradients of 5 MiB.
LARGE: dict[str, Any] = {**TINY, "d_model": 128, "n_layers": LAYERS, "steps": 2, "grad_accum_steps": 2, "nproc": 4}
EVERYBODY = (0, 1, 2, 3)


@pytest.mark.parametrize("data_parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_gradients_are_summed_while_backward_runs(data_parallel: str, tmp_path: Path) -> None:
    """The first gradients travel over all ranks when half of the parameters have none; keys' in every backward.

    Only the last micro-batch's backward sums gradients of parameters.
    """
    settings: dict[str, Any] = {"strategy": "cp", "strategy_opt": {"cp": 2, "data_parallel": data_parallel}}
    result, ranks = run_launches(TrainConfig(**LARGE, **settings, gradient_sync_mode="last"), tmp_path)
    assert result.exit_reason == "done", result.failure
    kind = "all_reduce" if data_parallel == "ddp" else "reduce_scatter"
    for rank, backwards in enumerate(ranks):
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert len(backwards) == 4
        for index, backward in enumerate(backwards):
            assert [found.kind for found in backward if found.ranks == pair] == ["reduce_scatter"] * LAYERS
            summed = [found for found in backward if found.ranks == EVERYBODY and found.kind == kind]
            if index % 2 == 0:
                assert summed == []
            else:
                assert len(summed) >= 2
                assert summed[0].ahead >= 0.5


def counted(folder: Path, **settings: Any) -> Result:
    """The result of a run whose collectives are counted."""
    small = {**TINY, "grad_accum_steps": 2, "warmup_steps": 2, "steps": 1, "nproc": 2}
    result = run(TrainConfig(**{**small, **settings, "run_dir": str(folder)}), quiet=True)
    assert result.exit_reason == "done", result.failure
    return result


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_without_shared_sequences_it_is_data_parallel(kind: str, tmp_path: Path) -> None:
    """With cp=1, calls, bytes and sync mode of a step are those of the strategy of that name."""
    expected = counted(tmp_path / "expected", strategy=kind, precision="bf16")
    options = {"cp": 1, "data_parallel": kind}
    found = counted(tmp_path / "found", strategy="cp", strategy_opt=options, precision="bf16")
    for field in ("collectives_per_step", "comm_bytes_per_step", "gradient_sync_mode"):
        assert getattr(expected, field) is not None
        assert getattr(found, field) == getattr(expected, field), field
