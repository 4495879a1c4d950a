"""Checkpoints of strategy `pp` are those of the whole model: exact on any cut, and under any other strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pp_states import trained, whole

FSDP = {"data_parallel": "fsdp"}
INTERLEAVED = {"schedule": "interleaved"}


def under(nproc: int, strategy: str = "pp", **options: Any) -> dict[str, Any]:
    """`strategy` on `nproc` ranks, in micro-batches of 2 samples."""
    copies = nproc // int(options.get("pp", nproc)) if strategy == "pp" else nproc
    return {"strategy": strategy, "nproc": nproc, "strategy_opt": options, "grad_accum_steps": 4 // copies}


BITWISE = {
    "2": under(2),
    "4-gpipe": under(4, schedule="gpipe"),
    "2x2": under(4, pp=2),
    "2x2-fsdp-interleaved": under(4, pp=2, **FSDP, **INTERLEAVED),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "2x2-fsdp-interleaved" else pytest.mark.slow) for c in BITWISE]
)
def test_resume_is_bitwise(case: str, tmp_path: Path) -> None:
    """With dropout and tied weights, stopped and resumed on equal ranks: losses, norms, weights and moments to the bit."""
    settings = {**BITWISE[case], "dropout": 0.2, "tie_embeddings": True}
    _, expected = trained(tmp_path / "whole", **settings, until_step=6)
    trained(tmp_path / "first", **settings, until_step=3)
    checkpoints = str(tmp_path / "first" / "checkpoints")
    result, seen = trained(
        tmp_path / "second", **{**settings, "checkpoint_dir": checkpoints}, until_step=6, resume="latest"
    )
    assert result.runtime["resume_deterministic"] is True, result.runtime
    for rank, reference in zip(seen, expected, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "samples_seen"):
            assert [getattr(r, name) for r in rank.records] == [getattr(r, name) for r in reference.records[3:]], name
        assert rank.ended.keys() == reference.ended.keys()
        for key, pieces in reference.ended.items():
            for (tensor, *place), (other, *there) in zip(pieces, rank.ended[key], strict=True):
                assert place == there
                assert torch.equal(tensor, other), key


#: So many of the crossings are tried in quick runs of the tests.
FAST = 2
CROSSINGS = [
    (under(4, pp=2, **FSDP), under(1, "single")),
    (under(2, "fsdp"), under(4)),
    (under(1, "single"), under(2)),
    (under(2), under(1, "single")),
    (under(2), under(2, "ddp")),
    (under(2, "ddp"), under(4, pp=2)),
    (under(4), under(4, "fsdp")),
    (under(4, "fsdp"), under(2, **INTERLEAVED)),
    (under(4, pp=2), under(4, "ddp")),
    (under(4, "ddp"), under(4, pp=2, **FSDP)),
    (under(4, pp=2, **FSDP), under(2, "fsdp")),
    (under(1, "single"), under(4, pp=2, **FSDP, **INTERLEAVED)),
    (under(4), under(2)),
    (under(2, **INTERLEAVED), under(4, schedule="gpipe")),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, marks=() if i < FAST else pytest.mark.slow) for i, pair in enumerate(CROSSINGS)],
)
def test_state_goes_to_other_ranks_exactly(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    """Weights, both moments and step counts are bitwise what was saved; training goes on with the same losses."""
    common = {"d_model": 20, "tie_embeddings": True}
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
