"""For tests: runs training and puts the state of all ranks together to whole tensors."""

from __future__ import annotations

import pickle
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from mtb_core import Job, Prepared, Result, RunInfo, State, StepRecord, Strategy, TrainConfig, hookimpl, run
from mtb_ddp.strategy import DDPStrategy
from mtb_fsdp.legacy import FSDP1Strategy
from mtb_fsdp.strategy import FSDPStrategy

TINY: dict[str, Any] = {
    "seq_length": 8,
    "vocab_size": 33,  # no multiple of 2
    "d_model": 20,
    "n_heads": 2,
    "n_layers": 2,
    "global_batch_size": 12,
    "learning_rate": 3e-3,
    "warmup_steps": 1,
    "steps": 3,
    "max_grad_norm": 0.5,
    "device": "cpu",
}
_STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDPStrategy, "fsdp": FSDPStrategy, "fsdp1": FSDP1Strategy}


@attrs.define
class Seen:
    """What one rank saw.

    Attributes:
        before, after: pieces (shape, offset, tensor) by key, when steps began and when they had ended.
        notes: what a test's own plugin left.
    """

    records: list[StepRecord] = attrs.field(factory=list)
    before: dict[str, list[Any]] = attrs.field(factory=dict)
    after: dict[str, list[Any]] = attrs.field(factory=dict)

    @property
    def losses(self) -> list[float]:
        return [r.loss for r in self.records]


class _Watch:
    def __init__(self, folder: Path) -> None:
        self._folder, self._seen, self._rank = folder, Seen(), -1
        self._prepared: Prepared | None = None
        self._strategy = Strategy()

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        self._rank = job.ctx.rank
        self._strategy = _STRATEGIES.get(job.config.strategy, Strategy)()
        self._prepared = yield
        return self._prepared

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        assert self._prepared is not None
        self._seen.before = _copied(self._strategy.state(self._prepared))

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        self._seen.records.append(record)

    @hookimpl
    def mtb_run_finished(self, exit_reason: str) -> None:
        if exit_reason == "done":
            assert self._prepared is not None
            self._seen.after = _copied(self._strategy.state(self._prepared))
            (self._folder / f"{self._rank}.pickle").write_bytes(pickle.dumps(self._seen))
        self._prepared = None


def _copied(state: State) -> dict[str, list[Any]]:
    return {key: [(p.shape, p.offset, p.tensor.clone()) for p in pieces] for key, pieces in state.pieces.items()}


def train(folder: Path, *, plugins: dict[str, Any] | None = None, **settings: Any) -> tuple[Result, list[Seen]]:
    """Train, by default something tiny; returns the result and what each rank saw."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TrainConfig(**{**TINY, "run_dir": str(folder / "run"), "sink": ("jsonl",), **settings})
    result = run(config, quiet=True, plugins={"watch": partial(_Watch, folder), **(plugins or {})})
    assert result.exit_reason == "done", result.failure
    return result, [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(config.nproc)]


def whole(parts: Sequence[dict[str, list[Any]]]) -> dict[str, torch.Tensor]:
    """Whole tensors from the pieces of all ranks, which must cover everything and agree where they overlap."""
    out: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for pieces in parts:
        assert pieces.keys() == parts[0].keys()
        for key, items in pieces.items():
            for shape, offset, tensor in items:
                full = out.setdefault(key, torch.zeros(shape, dtype=tensor.dtype))
                done = filled.setdefault(key, torch.zeros(shape, dtype=torch.bool))
                assert full.shape == shape
                box = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
                assert bool((full[box] == tensor)[done[box]].all()), f"ranks disagree on {key}"
                full[box], done[box] = tensor, True
    assert out.keys() == parts[0].keys()
    assert all(bool(done.all()) for done in filled.values())
    return out


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether they are equal to the bit."""
    assert left.keys() == right.keys()
    return all(torch.equal(left[k], right[k]) for k in left)


def before(seen: Sequence[Seen]) -> dict[str, torch.Tensor]:
    """The state when steps began."""
    return whole([s.before for s in seen])


def after(seen: Sequence[Seen]) -> dict[str, torch.Tensor]:
    """The state when steps had ended."""
    return whole([s.after for s in seen])
