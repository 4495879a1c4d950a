"""Strategy `ddp` on real ranks; parity with `single` and resuming are in the repository's own tests."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mtb_core import Job, MicroBatch, Prepared, TrainConfig, hookimpl, run
from mtb_kit.launches import run_launches
from mtb_kit.recording import run_recorded

TINY: dict[str, Any] = {
    "strategy": "ddp",
    "nproc": 2,
    "seq_length": 8,
    "vocab_size": 64,
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 2,
    "global_batch_size": 8,
    "warmup_steps": 4,
    "steps": 8,
    "learning_rate": 1e-2,
    "device": "cpu",
}


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 2e-3), ("bf16", 5e-3), ("powersgd", 0.1)])
def test_compressed_gradients_train_alike(hook: str, tolerance: float, tmp_path: Path) -> None:
    """Losses stay near the uncompressed ones, are not the same, fall, and fewer bytes are sent."""
    plain, expected = run_recorded(TrainConfig(**TINY), tmp_path / "plain")
    result, ranks = run_recorded(TrainConfig(**TINY, strategy_opt={"comm_hook": hook}), tmp_path / "compressed")
    assert result.exit_reason == "done", result.failure
    assert ranks[0].losses == pytest.approx(expected[0].losses, rel=tolerance)
    assert ranks[0].losses != expected[0].losses
    assert ranks[0].losses[-1] < ranks[0].losses[0]
    assert torch.equal(ranks[0].final["model/head.weight"], ranks[1].final["model/head.weight"])
    assert result.comm_bytes_per_step is not None
    assert plain.comm_bytes_per_step is not None
    assert result.comm_bytes_per_step["all_reduce"] < plain.comm_bytes_per_step["all_reduce"]


class Watch:
    """Notes how much optimizer state each rank holds."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rank, self._noted = folder, -1, {}

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        prepared = yield
        self._rank = job.ctx.rank
        return prepared

    @hookimpl(wrapper=True)
    def mtb_close(self, prepared: Prepared) -> Generator[None, None, None]:
        optimizer = getattr(prepared.optimizer, "optim", prepared.optimizer)
        held = [v.numel() for state in optimizer.state.values() for k, v in state.items() if k != "step"]
        self._noted["elements"] = sum(held)
        (self._folder / f"watch{self._rank}").write_bytes(pickle.dumps(self._noted))
        yield


def watched(tmp_path: Path, **settings: Any) -> list[dict[str, Any]]:
    config = TrainConfig(**{**TINY, **settings, "run_dir": str(tmp_path / "run"), "sink": ["jsonl"]})
    result = run(config, quiet=True, plugins={"watch": partial(Watch, tmp_path)})
    assert result.exit_reason == "done", result.failure
    return [pickle.loads((tmp_path / f"watch{rank}").read_bytes()) for rank in range(config.nproc)]


def test_zero1_splits_the_optimizer_state(tmp_path: Path) -> None:
    """Each rank keeps AdamW's two moments of its share only; together they are those of the whole model."""
    notes = watched(tmp_path / "", strategy_opt={"zero1": True})
    whole = 2 * (64 * 16 * 2 + 8 * 16 + 2 * (12 * 16 * 16 + 2 * 16) + 16)
    assert sum(note["elements"] for note in notes) == whole
    assert max(note["elements"] for note in notes) < 0.75 * whole


class Breaks:
    """Leaves the sync context of the first micro-batch by an exception, twice, then notes what the flag says."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._left = folder, 2

    @hookimpl(wrapper=True)
    def mtb_micro_batch(
        self, prepared: Prepared, micro: MicroBatch
    ) -> Generator[None, AbstractContextManager[None], AbstractContextManager[None]]:
        context = yield
        if micro.index or not self._left:
            return context
        self._left -= 1
        return self._broken(prepared, context)

    @contextmanager
    def _broken(self, prepared: Prepared, context: AbstractContextManager[None]) -> Generator[None]:
        try:
            with context:
                assert prepared.module.require_backward_grad_sync is False
                raise KeyError
        except KeyError:
            (self._folder / "restored").write_text(str(prepared.module.require_backward_grad_sync))
        yield


def test_the_sync_context_restores_itself(tmp_path: Path) -> None:
    """After an exception inside no_sync, DDP synchronises again."""
    config = TrainConfig(**{**TINY, "grad_accum_steps": 2, "steps": 2, "run_dir": str(tmp_path / "run")})
    result = run(config, quiet=True, plugins={"breaks": partial(Breaks, tmp_path)})
    assert result.exit_reason == "done", result.failure
    assert (tmp_path / "restored").read_text() == "True"


#: Gradients of 5 MiB.
LARGE: dict[str, Any] = {**TINY, "d_model": 128, "vocab_size": 512, "n_layers": 6, "steps": 2, "warmup_steps": 0}


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1}], ids=str)
def test_buckets_are_reduced_while_backward_runs(options: dict[str, Any], tmp_path: Path) -> None:
    """In every step the first bucket is on its way while 60% of the parameters have no gradient yet.

    Only the last micro-batch's backward communicates.
    """
    config = TrainConfig(**{**LARGE, "grad_accum_steps": 2, "strategy_opt": options})
    result, ranks = run_launches(config, tmp_path)
    assert result.exit_reason == "done", result.failure
    for backwards in ranks:
        assert len(backwards) == 4
        for silent, last in zip(backwards[::2], backwards[1::2], strict=True):
            assert silent == []
            assert last[0].ahead >= 0.6
            assert sum(launch.message_bytes for launch in last) == 4 * result.parameters


EXPANDED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.words, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.register_buffer("twice", buffer)

    def forward(self, tokens):
        return self.head(self.words(tokens)) * self.twice[0, 0]

def expanded(config):
    return Model(torch.ones(4).expand(2, 4))

def turned(config):
    return Model(torch.ones(3, 8).t())
"""


def test_buffers_of_any_layout(tmp_path: Path) -> None:
    """An expanded buffer is refused by name; a transposed one is saved as it is."""
    path = tmp_path / "model.py"
    path.write_text(EXPANDED)
    settings = {**TINY, "steps": 1, "warmup_steps": 0}
    result, _ = run_recorded(TrainConfig(**settings, model=f"{path}:expanded"), tmp_path / "expanded")
    assert result.failure is not None
    assert "Buffer 'twice' of the model is expanded" in result.failure["message"]
    result, ranks = run_recorded(TrainConfig(**settings, model=f"{path}:turned"), tmp_path / "turned")
    assert result.exit_reason == "done", result.failure
    assert torch.equal(ranks[1].final["model/twice"], torch.ones(8, 3))
