"""Checkpoints of strategy `cp` are those of the whole model: exact on any degrees, and under any other strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cp_states import trained, whole

MODELS = Path(__file__).parent / "cp_models.py"
FSDP = {"data_parallel": "fsdp"}


def under(nproc: int, strategy: str = "cp", **options: Any) -> dict[str, Any]:
    return {"strategy": strategy, "nproc": nproc, "strategy_opt": options}


BITWISE = {
    "2-gather": under(2),
    "2-ring": under(2, attention="ring"),
    "4-ring": under(4, attention="ring"),
    "2x2-gather-fsdp": under(4, cp=2, **FSDP),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "2-ring" else pytest.mark.slow) for c in BITWISE])
def test_resume_is_bitwise(case: str, tmp_path: Path) -> None:
    """With dropout, stopped and resumed on equal ranks: losses, norms, weights and moments to the bit."""
    settings = {**BITWISE[case], "dropout": 0.2, "grad_accum_steps": 2}
    _, expected = trained(tmp_path / "whole", **settings, until_step=6)
    trained(tmp_path / "first", **settings, until_step=3)
    checkpoints = str(tmp_path / "first" / "checkpoints")
    result, seen = trained(tmp_path / "second", **settings, checkpoint_dir=checkpoints, until_step=6, resume="latest")
    assert result.runtime["resume_deterministic"] is True, result.runtime
    for rank, other in zip(seen, expected, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "samples_seen"):
            assert rank.of(name) == other.of(name)[3:], name
        for key, pieces in other.ended.items():
            for (tensor, *place), (found, *there) in zip(pieces, rank.ended[key], strict=True):
                assert place == there
                assert torch.equal(tensor, found), key


#: So many of the crossings are tried in quick runs of the tests.
FAST = 1
CROSSINGS = [
    (under(4, cp=2, attention="ring", **FSDP), under(2, "ddp")),
    (under(1, "single"), under(2)),
    (under(2), under(1, "single")),
    (under(1, "single"), under(4, attention="ring")),
    (under(4, attention="ring"), under(1, "single")),
    (under(2, "ddp"), under(4, cp=2)),
    (under(4, cp=2), under(4, "fsdp")),
    (under(2, "fsdp"), under(4, cp=2, **FSDP)),
    (under(4, cp=2, **FSDP), under(1, "single")),
    (under(2, **FSDP), under(4, balance="contiguous")),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, marks=() if i < FAST else pytest.mark.slow) for i, pair in enumerate(CROSSINGS)],
)
def test_state_goes_to_other_ranks_exactly(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    """Weights, both moments and step counts are bitwise what was saved; training goes on with the same losses."""
    _, expected = trained(tmp_path / "whole", **before, until_step=5)
    _, saved = trained(tmp_path / "first", **before, until_step=3)
    checkpoints = str(tmp_path / "first" / "checkpoints")
    _, seen = trained(tmp_path / "second", **after, checkpoint_dir=checkpoints, until_step=5, resume="latest")
    wanted, found = whole([s.ended for s in saved]), whole([s.loaded for s in seen])
    assert found.keys() == wanted.keys()
    assert {key.rpartition("/")[2] for key in found if key.startswith("optim/")} == {"step", "exp_avg", "exp_avg_sq"}
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key
    for rank in seen:
        assert rank.of("loss") == pytest.approx(expected[0].of("loss")[3:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", ["ddp", "fsdp"])
def test_saving_does_not_change_buffers(data_parallel: str, tmp_path: Path) -> None:
    """Ranks save one value of a buffer that follows their tokens; a run that saves takes the steps of one that does not."""
    settings: dict[str, Any] = {**under(2, data_parallel=data_parallel), "until_step": 5, "grad_accum_steps": 2}
    settings |= {"model": f"{MODELS}:averaging", "vocab_size": 64, "seq_length": 8}
    _, plain = trained(tmp_path / "plain", **settings)
    _, saving = trained(tmp_path / "saving", **settings, save_every=1)
    assert saving[0].of("loss") == plain[0].of("loss")
    for seen in (plain, saving):
        assert whole([s.ended for s in seen])["model/scale"] != 1
