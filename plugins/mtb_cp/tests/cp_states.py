"""For tests of strategy `cp`: runs training and puts what ranks say they hold together to whole tensors."""

from __future__ import annotations

import pickle
import random
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from mtb_core import Job, Prepared, Result, State, StepRecord, TrainConfig, hookimpl, run

#: 22 samples and one with 5 targets, in an order of its own each epoch; the last step of an epoch has 7 samples.
TEXT_BYTES = 22 * 16 + 6
TINY: dict[str, Any] = {
    "seq_length": 16,
    "vocab_size": 256,
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 2,
    "global_batch_size": 8,
    "learning_rate": 3e-3,
    "max_grad_norm": 0.5,
    "warmup_steps": 0,
    "device": "cpu",
}


@attrs.define
class Seen:
    """Everything that one rank saw: records of all steps, and its pieces (tensor, shape, offset) by key at three moments."""

    rank: int = -1
    records: list[StepRecord] = attrs.field(factory=list)
    started: dict[str, list[Any]] = attrs.field(factory=dict)
    loaded: dict[str, list[Any]] = attrs.field(factory=dict)
    ended: dict[str, list[Any]] = attrs.field(factory=dict)

    def of(self, name: str) -> list[Any]:
        """The figure `name` of every step's record."""
        return [getattr(record, name) for record in self.records]


class StateRecorder:
    """Keeps the strategy's own state before and after loading, and at each save."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen = folder, Seen()

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        self._seen.rank = job.ctx.rank
        return (yield)

    @hookimpl(wrapper=True)
    def mtb_state(self, prepared: Prepared) -> Generator[None, State, State]:
        state = yield
        self._seen.ended = _copied(state)
        self._seen.started = self._seen.started or self._seen.ended
        return state

    @hookimpl(wrapper=True)
    def mtb_state_loaded(self, prepared: Prepared, state: State) -> Generator[None, None, None]:
        yield
        self._seen.loaded = _copied(state)

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        self._seen.records.append(record)

    @hookimpl
    def mtb_run_finished(self, exit_reason: str) -> None:
        (self._folder / f"{self._seen.rank}.pickle").write_bytes(pickle.dumps(self._seen))


def _copied(state: State) -> dict[str, list[Any]]:
    return {key: [(p.tensor.clone(), p.shape, p.offset) for p in pieces] for key, pieces in state.pieces.items()}


def text(folder: Path) -> str:
    """A file of random bytes; the last of its samples is short."""
    path = folder / "text.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(random.Random(0).randbytes(TEXT_BYTES).replace(b"\0", b"1"))
    return str(path)


def trained(folder: Path, **settings: Any) -> tuple[Result, list[Seen]]:
    """Run `settings` over `TINY`, with a checkpoint at the end; the result and what each rank saw."""
    folder.mkdir(parents=True)
    values = {**TINY, "checkpoint_dir": str(folder / "checkpoints"), "save_every": 100, **settings}
    config = TrainConfig(**values, run_dir=str(folder / "run"))
    result = run(config, quiet=True, plugins={"states": partial(StateRecorder, folder)})
    assert result.exit_reason == "done", result.failure
    return result, [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(config.nproc)]


def whole(moments: Sequence[dict[str, list[Any]]]) -> dict[str, torch.Tensor]:
    """Each tensor put together from all ranks' pieces; all of it must be there, and ranks that overlap must agree."""
    out: dict[str, torch.Tensor] = {}
    for moment in moments:
        for key, pieces in moment.items():
            for tensor, shape, offset in pieces:
                full = out.setdefault(key, torch.full(shape, float("nan"), dtype=tensor.dtype))
                box = full[tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))]
                filled = ~box.isnan()
                assert torch.equal(box[filled], tensor[filled]), f"{key}: ranks differ"
                box.copy_(tensor)
    for key, full in out.items():
        assert not full.isnan().any(), f"{key}: not all of it is held"
    return out
