"""Checkpoints of strategy `tp` are those of the whole model: exact on any degrees, and under any other strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tp_states import trained, whole

FSDP = {"data_parallel": "fsdp"}
SEQUENCE = {"sequence_parallel": True}
ALL = {**SEQUENCE, "vocab_parallel_loss": True}


def under(nproc: int, strategy: str = "tp", **options: Any) -> dict[str, Any]:
    return {"strategy": strategy, "nproc": nproc, "strategy_opt": options}


BITWISE = {
    "2x1": under(2),
    "2x2-fsdp-all": under(4, tp=2, **FSDP, **ALL),
    "1x3": under(3, tp=1),
    "2x2-all": under(4, tp=2, **ALL),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "2x2-fsdp-all" else pytest.mark.slow) for c in BITWISE]
)
def test_resume_is_bitwise(case: str, tmp_path: Path) -> None:
    """With dropout, stopped and resumed on equal ranks: losses, norms, weights and moments to the bit."""
    settings = {**BITWISE[case], "dropout": 0.2, "grad_accum_steps": 2, "global_batch_size": 12}
    result, expected = trained(tmp_path / "whole", **settings, until_step=6)
    trained(tmp_path / "first", **settings, until_step=3)
    checkpoints = str(tmp_path / "first" / "checkpoints")
    result, seen = trained(
        tmp_path / "second", **{**settings, "checkpoint_dir": checkpoints}, until_step=6, resume="latest"
    )
    assert result.runtime["resume_deterministic"] is True, result.runtime
    for rank, reference in zip(seen, expected, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "samples_seen"):
            assert [getattr(r, name) for r in rank.records] == [getattr(r, name) for r in reference.records[3:]], name
        for key, pieces in reference.ended.items():
            for (tensor, *place), (other, *there) in zip(pieces, rank.ended[key], strict=True):
                assert place == there
                assert torch.equal(tensor, other), key


#: So many of the crossings are tried in quick runs of the tests.
FAST = 2
CROSSINGS = [
    (under(2, **ALL), under(1, "single")),
    (under(1, "single"), under(4, tp=2, **FSDP)),
    (under(2, "ddp"), under(2)),
    (under(4, tp=2, **FSDP), under(3, "ddp")),
    (under(4, tp=2, **FSDP), under(4, tp=4, **SEQUENCE)),
    (under(4, tp=4), under(6, tp=2, **FSDP, vocab_parallel_loss=True)),
    (under(3, "fsdp"), under(4, tp=2, **FSDP)),
    (under(6, tp=2, **FSDP), under(2, "fsdp")),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, marks=() if i < FAST else pytest.mark.slow) for i, pair in enumerate(CROSSINGS)],
)
def test_state_goes_to_other_ranks_exactly(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    """Weights, both moments and step counts are bitwise what was saved; training goes on with the same losses."""
    common = {"n_heads": 4, "d_model": 20, "global_batch_size": 12, "tie_embeddings": True}
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


def test_a_checkpoint_right_after_an_evaluation(tmp_path: Path) -> None:
    """FSDP leaves parameters gathered after a forward without backward; what is saved then are the shards."""
    settings = {**under(4, tp=2, **FSDP, **ALL), "until_step": 2}
    _, plain = trained(tmp_path / "plain", **settings)
    _, after = trained(tmp_path / "after", **settings, eval_data="synthetic", eval_every=2, eval_batches=1)
    expected, found = whole([s.ended for s in plain]), whole([s.ended for s in after])
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
