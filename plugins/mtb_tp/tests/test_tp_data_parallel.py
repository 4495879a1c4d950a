"""Strategy `tp` communicates over data-parallel ranks as strategies `ddp` and `fsdp` do: when, how often, how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tp_states import TINY

from mtb_core import Result, TrainConfig, run
from mtb_kit.launches import Launch, run_launches

#: Gradients of 3 MiB on each of two tensor-parallel ranks.
LARGE: dict[str, Any] = {**TINY, "d_model": 128, "vocab_size": 512, "n_layers": 8, "steps": 2, "grad_accum_steps": 2}


def data_parallel(rank: int, backward: list[Launch]) -> list[Launch]:
    """The collectives that sum gradients over the ranks that see different samples: with tp=2, every second rank."""
    peers = (rank % 2, rank % 2 + 2)
    return [launch for launch in backward if launch.kind in ("all_reduce", "reduce_scatter") and launch.ranks == peers]


def test_ddp_reduces_buckets_while_backward_runs(tmp_path: Path) -> None:
    """In every step the first bucket is on its way while half of the parameters have no gradient yet.

    Only the last micro-batch's backward sums gradients over the data-parallel ranks.
    """
    result, ranks = run_launches(
        TrainConfig(**{**LARGE, "strategy": "tp", "nproc": 4, "strategy_opt": {"tp": 2}}), tmp_path
    )
    assert result.exit_reason == "done", result.failure
    for rank, backwards in enumerate(ranks):
        found = [data_parallel(rank, backward) for backward in backwards]
        assert len(found) == 4
        for silent, last in zip(found[::2], found[1::2], strict=True):
            assert silent == []
            assert len(last) >= 2
            assert last[0].ahead >= 0.5


@pytest.mark.parametrize("mode", ["auto", "last"])
def test_fsdp_reduces_each_block_while_backward_runs(mode: str, tmp_path: Path) -> None:
    """In each backward that synchronises, the first block's gradients are on their way while half of all are missing.

    `auto` synchronises each micro-batch, `last` only the last.
    """
    options = {"tp": 2, "data_parallel": "fsdp"}
    settings = {**LARGE, "strategy": "tp", "nproc": 4, "strategy_opt": options, "gradient_sync_mode": mode}
    result, ranks = run_launches(TrainConfig(**settings), tmp_path)
    assert result.exit_reason == "done", result.failure
    for rank, backwards in enumerate(ranks):
        assert len(backwards) == 4
        for index, backward in enumerate(backwards):
            found = data_parallel(rank, backward)
            if mode == "last" and index % 2 == 0:
                assert found == []
                continue
            assert [launch.kind for launch in found] == ["reduce_scatter"] * 9
            assert found[0].ahead >= 0.5


def counted(folder: Path, **settings: Any) -> Result:
    """The result of a run whose collectives are counted."""
    small = {**TINY, "grad_accum_steps": 2, "warmup_steps": 2, "steps": 1, "nproc": 2}
    result = run(TrainConfig(**{**small, **settings, "run_dir": str(folder)}), quiet=True)
    assert result.exit_reason == "done", result.failure
    return result


@pytest.mark.parametrize(
    ("mode", "precision"), [("auto", "bf16"), ("last", "bf16"), ("every", "fp32")], ids=lambda text: text
)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_same_shards_need_the_same_collectives(kind: str, mode: str, precision: str, tmp_path: Path) -> None:
    """Where no rank shares a layer, calls, bytes and sync mode of a step are those of the strategy of that name."""
    common = {"gradient_sync_mode": mode, "precision": precision}
    expected = counted(tmp_path / "expected", strategy=kind, **common)
    found = counted(tmp_path / "found", strategy="tp", strategy_opt={"tp": 1, "data_parallel": kind}, **common)
    for field in ("collectives_per_step", "comm_bytes_per_step", "gradient_sync_mode"):
        assert getattr(expected, field) is not None
        assert getattr(found, field) == getattr(expected, field), field
