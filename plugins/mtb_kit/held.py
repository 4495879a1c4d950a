"""For tests of strategies: a training, with the state that each rank says it holds at three moments."""

from __future__ import annotations

import pickle
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from mtb_core.api.hooks import hookimpl
from mtb_core.api.records import StepRecord
from mtb_core.api.values import Job, Prepared, State
from mtb_core.config import TrainConfig
from mtb_core.measure.result import Result
from mtb_core.running import run

from .stage import Part
from .states import Whole, join

#: Copies of a rank's parts by key.
Held = Mapping[str, Sequence[Part]]


@attrs.define
class RankHeld:
    """One rank's view of a training.

    Attributes:
        records: of all steps.
        evaluated: losses of evaluations.
        started: the state before anything is loaded.
        loaded: the state after loading; empty without.
        ended: the state of the last save.
    """

    rank: int = -1
    records: list[StepRecord] = attrs.field(factory=list)
    evaluated: list[float] = attrs.field(factory=list)
    started: Held = attrs.field(factory=dict)
    loaded: Held = attrs.field(factory=dict)
    ended: Held = attrs.field(factory=dict)

    def of(self, name: str) -> list[Any]:
        """The figure `name` of every step's record."""
        return [getattr(record, name) for record in self.records]

    @property
    def losses(self) -> list[float]:
        """Loss of every step."""
        return self.of("loss")


class StateRecorder:
    """Keeps the strategy's own state before and after loading, and at each save; writes a `RankHeld` at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._held = folder, RankHeld()

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        """Learn the rank."""
        self._held.rank = job.ctx.rank
        return (yield)

    @hookimpl(wrapper=True)
    def mtb_state(self) -> Generator[None, State, State]:
        """Copy the state."""
        state = yield
        self._held.ended = _copied(state)
        self._held.started = self._held.started or self._held.ended
        return state

    @hookimpl(wrapper=True)
    def mtb_state_loaded(self, state: State) -> Generator[None, None, None]:
        """Copy the state."""
        yield
        self._held.loaded = _copied(state)

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        """Keep the record."""
        self._held.records.append(record)

    @hookimpl
    def mtb_evaluated(self, loss: float) -> None:
        """Keep the loss."""
        self._held.evaluated.append(loss)

    @hookimpl
    def mtb_run_finished(self) -> None:
        """Write it all down."""
        (self._folder / f"{self._held.rank}.pickle").write_bytes(pickle.dumps(self._held))


def run_held(folder: Path, settings: Mapping[str, Any]) -> tuple[Result, list[RankHeld]]:
    """Train quietly in `folder`, which must not exist, with a checkpoint at the end.

    Returns:
        The result, and each rank's view by rank.

    Raises:
        RunFailed: the run did not come to its end.
    """
    folder.mkdir(parents=True)
    values = {"checkpoint_dir": str(folder / "checkpoints"), "save_every": 100, **settings}
    config = TrainConfig(**values, run_dir=str(folder / "run"))
    result = run(config, quiet=True, plugins={"states": partial(StateRecorder, folder)}).check()
    ranks = range(config.nproc)
    return result, [pickle.loads((folder / f"{r}.pickle").read_bytes()) for r in ranks]  # noqa: S301  (written just now)


def whole(held: Sequence[Held]) -> Whole:
    """Each tensor, put together from the parts of all ranks.

    Raises:
        Mismatch: not all of a tensor is held, or ranks that hold the same elements disagree.
    """
    return join(dict(enumerate(held)))


def _copied(state: State) -> Held:
    return {
        key: [(p.tensor.clone(), tuple(p.shape), tuple(p.offset)) for p in pieces]
        for key, pieces in state.pieces.items()
    }
