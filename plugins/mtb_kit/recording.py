"""A run plugin that keeps what tests compare: final weights and optimizer state, and the records of every step."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from functools import partial
from pathlib import Path

import attrs
import torch

from mtb_core.api.hooks import hookimpl
from mtb_core.api.records import StepRecord
from mtb_core.api.state import module_state
from mtb_core.api.values import Job, Prepared, RankContext
from mtb_core.config import TrainConfig
from mtb_core.measure.result import Result
from mtb_core.running import run


@attrs.define
class RankRecord:
    """Record of one rank.

    Attributes:
        initial: model parameters before the first step, by name; this rank's local parts.
        final: the same after the last step.
    """

    rank: int
    initial: dict[str, torch.Tensor] = attrs.field(factory=dict)
    final: dict[str, torch.Tensor] = attrs.field(factory=dict)
    records: list[StepRecord] = attrs.field(factory=list)

    @property
    def losses(self) -> list[float]:
        """Loss of every step."""
        return [r.loss for r in self.records]


class Recorder:
    """Writes a `RankRecord` to ``folder`` when the trial ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._record = RankRecord(-1)

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        """Keep the initial weights."""
        prepared = yield
        ctx: RankContext = job.ctx
        self._record.rank = ctx.rank
        self._record.initial = _weights(prepared)
        return prepared

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        """Keep the record."""
        self._record.records.append(record)

    @hookimpl(wrapper=True)
    def mtb_close(self, prepared: Prepared) -> Generator[None, None, None]:
        """Keep the final weights and write everything down."""
        self._record.final = _weights(prepared)
        path = self._folder / f"{self._record.rank}.pickle"
        path.write_bytes(pickle.dumps(self._record))
        yield


def _weights(prepared: Prepared) -> dict[str, torch.Tensor]:
    state = module_state(prepared.core, torch.optim.SGD(prepared.core.parameters()))
    return {k: pieces[0].tensor.clone() for k, pieces in state.pieces.items()}


def run_recorded(config: TrainConfig, folder: Path) -> tuple[Result, list[RankRecord]]:
    """Run `config` quietly, run folder under `folder`; returns the result and what each rank recorded, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    config = attrs.evolve(config, run_dir=str(folder / "run"), sink=("jsonl",))
    result = run(config, quiet=True, plugins={"recorder": partial(Recorder, folder)})
    paths = sorted(folder.glob("*.pickle"), key=lambda p: int(p.stem))
    return result, [pickle.loads(path.read_bytes()) for path in paths]  # noqa: S301  (written by ourselves, just now)
