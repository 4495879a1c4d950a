"""Running a strategy and keeping its whole state, put together from the ranks' pieces."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from mtb_core import Job, Prepared, Result, State, StepRecord, TrainConfig, hookimpl, load_reference, run
from mtb_core.registry.discovery import discover

COMMON: dict[str, Any] = {
    "seq_length": 8,
    "vocab_size": 61,
    "d_model": 12,
    "n_heads": 2,
    "n_layers": 2,
    "global_batch_size": 12,
    "learning_rate": 3e-3,
    "adam_eps": 1e-6,
    "warmup_steps": 1,
    "steps": 19,
    "max_grad_norm": 0.5,
    "device": "cpu",
}

Parts = Mapping[str, list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]]


@attrs.define
class Recorded:
    """What a run did: its result, every rank's step records, and its state before the first step, as loaded, and after the last."""

    result: Result
    records: list[list[StepRecord]]
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]

    @property
    def losses(self) -> list[float]:
        """Of rank 0."""
        return [record.loss for record in self.records[0]]


class Recorder:
    """Writes what `Recorded` is made of to ``folder``, one file a rank."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rank, self._records = folder, -1, []
        self._state: Callable[[Prepared], State]
        self._initial: Parts = {}
        self._prepared: Prepared | None = None

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        self._prepared = yield
        self._rank = job.ctx.rank
        self._state = load_reference(discover().strategy(job.config.strategy).impl)().state
        return self._prepared

    @hookimpl
    def mtb_run_started(self) -> None:
        assert self._prepared is not None
        self._initial = _parts(self._state(self._prepared))

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        self._records.append(record)

    @hookimpl(wrapper=True)
    def mtb_close(self, prepared: Prepared) -> Generator[None, None, None]:
        data = (self._records, self._initial, _parts(self._state(prepared)))
        (self._folder / f"{self._rank}.pickle").write_bytes(pickle.dumps(data))
        self._prepared = None
        yield


def recorded(folder: Path, *, plugins: Mapping[str, Callable[[], object]] | None = None, **settings: Any) -> Recorded:
    """Run with `COMMON` and `settings`; the run folder is under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TrainConfig(**{**COMMON, **settings, "run_dir": str(folder / "run"), "sink": ("jsonl",)})
    result = run(config, quiet=True, plugins={"recorder": partial(Recorder, folder), **(plugins or {})})
    assert result.exit_reason == "done", result.failure
    ranks = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(config.nproc)]
    initial, final = ([rank[which] for rank in ranks] for which in (1, 2))
    return Recorded(result, [rank[0] for rank in ranks], whole(initial), whole(final))


def _parts(state: State) -> Parts:
    return {k: [(p.shape, p.offset, p.tensor.detach().clone()) for p in pieces] for k, pieces in state.pieces.items()}


def whole(ranks: list[Parts]) -> dict[str, torch.Tensor]:
    """The full tensors; every element must be there, and the same wherever it is given twice."""
    out: dict[str, torch.Tensor] = {}
    known: dict[str, torch.Tensor] = {}
    for parts in ranks:
        for key, pieces in parts.items():
            for shape, offset, part in pieces:
                full = out.setdefault(key, torch.zeros(shape, dtype=part.dtype))
                there = known.setdefault(key, torch.zeros(shape, dtype=torch.bool))
                place = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
                assert torch.all(~there[place] | (full[place] == part)), key
                full[place], there[place] = part, True
    for key, there in known.items():
        assert there.all(), key
    return out
