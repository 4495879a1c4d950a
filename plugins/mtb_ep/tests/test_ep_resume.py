"""Checkpoints of strategy `ep` are those of the whole model: exact on any degrees, and under any other strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ep_states import trained, whole


def under(nproc: int, strategy: str = "ep", **options: Any) -> dict[str, Any]:
    return {"strategy": strategy, "nproc": nproc, "strategy_opt": options}


@pytest.mark.parametrize(
    "how", [under(2), pytest.param(under(4, ep=2), marks=pytest.mark.slow)], ids=["ep2", "ep2-dp2"]
)
def test_resume_is_bitwise(how: dict[str, Any], tmp_path: Path) -> None:
    """With dropout, stopped and resumed on equal ranks: losses, norms, weights and moments to the bit."""
    settings = {**how, "dropout": 0.2, "grad_accum_steps": 2}
    _, expected = trained(tmp_path / "whole", **settings, until_step=6)
    trained(tmp_path / "first", **settings, until_step=3)
    checkpoints = str(tmp_path / "first" / "checkpoints")
    result, seen = trained(tmp_path / "second", **settings, checkpoint_dir=checkpoints, until_step=6, resume="latest")
    assert result.runtime["resume_deterministic"] is True, result.runtime
    for rank, wanted in zip(seen, expected, strict=True):
        for name in ("loss", "grad_norm", "metrics", "samples_seen"):
            assert [getattr(r, name) for r in rank.records] == [getattr(r, name) for r in wanted.records[3:]], name
        for key, pieces in wanted.ended.items():
            for (tensor, *place), (other, *there) in zip(pieces, rank.ended[key], strict=True):
                assert place == there
                assert torch.equal(tensor, other), key


#: So many of the crossings are tried in quick runs of the tests.
FAST = 2
CROSSINGS = [
    (under(4, ep=2), under(1, "single")),
    (under(1, "single"), under(2)),
    (under(1, "single"), under(4, ep=2)),
    (under(4), under(1, "single")),
    (under(2), under(2, "ddp")),
    (under(2, "ddp"), under(4)),
    (under(4, "ddp"), under(4, ep=2)),
    (under(4, ep=2), under(4, "ddp")),
    (under(2), under(2, "fsdp")),
    (under(4, "fsdp"), under(2)),
    (under(2, "fsdp"), under(4, ep=2)),
    (under(4, ep=4), under(4, "fsdp")),
    (under(2), under(4)),
    (under(4, ep=4), under(4, ep=1)),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, marks=() if i < FAST else pytest.mark.slow) for i, pair in enumerate(CROSSINGS)],
)
def test_state_goes_to_other_ranks_exactly(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    """Weights, both moments and step counts are bitwise what was saved; training goes on with the same losses."""
    common = {"tie_embeddings": True, "adam_eps": 1e-6}
    _, expected = trained(tmp_path / "whole", **common, **before, until_step=5)
    _, saved = trained(tmp_path / "first", **common, **before, until_step=3)
    checkpoints = str(tmp_path / "first" / "checkpoints")
    _, seen = trained(tmp_path / "second", **common, **after, checkpoint_dir=checkpoints, until_step=5, resume="latest")
    wanted, found = whole([s.ended for s in saved]), whole([s.loaded for s in seen])
    assert found.keys() == wanted.keys()
    assert {key.rpartition("/")[2] for key in found if key.startswith("optim/")} == {"step", "exp_avg", "exp_avg_sq"}
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key
    for rank in seen:
        assert rank.losses == pytest.approx(expected[0].losses[3:], rel=1e-5)


def test_each_rank_holds_its_experts_only(tmp_path: Path) -> None:
    """Of the experts and their optimizer state a rank of ep=2 has half, of everything else all."""
    _, seen = trained(tmp_path / "run", **under(2), until_step=1)
    for rank, trace in enumerate(seen):
        for key, ((tensor, shape, offset),) in trace.ended.items():
            share = 2 if ".experts." in key and tensor.dim() else 1
            assert tensor.shape[:1] == torch.Size(n // share for n in shape[:1]), key
            assert offset == ((rank * 2 if share == 2 else 0), *(0,) * (len(shape) - 1))[: len(shape)], key
