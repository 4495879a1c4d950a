"""Run plugins that act at chosen places, for `test_acting`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from mtb_core import Control, Job, Phase, Piece, Prepared, RankContext, RunInfo, State, StepRecord, hookimpl


@attrs.frozen
class Ask:
    """A request: `make(control)` on rank `rank` (None: on all) in `hook` of `step`.

    Attributes:
        marker: a file that is made with it; where it exists already, nothing is asked.
        after: a file that must exist, or nothing is asked yet.
    """

    hook: str
    step: int
    make: Callable[[Control], object]
    rank: int | None = None
    marker: Path | None = None
    after: Path | None = None


class Acts:
    """Makes each request once. Hooks: ``run_started`` (step 0), ``phase`` (as a step begins), ``recorded``."""

    def __init__(self, *asks: Ask) -> None:
        self._asks = list(asks)
        self._info: RunInfo | None = None

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        self._info = info
        self._at("run_started", 0)

    @hookimpl
    def mtb_phase(self, phase: Phase, step: int) -> None:
        if phase == "step":
            self._at("phase", step)

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        self._at("recorded", record.global_step)

    def _at(self, hook: str, step: int) -> None:
        assert self._info is not None
        assert self._info.control is not None
        for ask in [a for a in self._asks if (a.hook, a.step) == (hook, step)]:
            if ask.after is not None and not ask.after.exists():
                continue
            self._asks.remove(ask)
            if ask.rank not in {None, self._info.ctx.rank} or (ask.marker is not None and ask.marker.exists()):
                continue
            if ask.marker is not None:
                ask.marker.touch()
            ask.make(self._info.control)


def die(_control: Control) -> None:
    """End this process without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(_control: Control) -> None:
    """Send this process SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


class Journal:
    """Writes what this rank is told, one JSON list a line, to ``journal_RANK`` in `folder`; `digest` of the weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rank = 0
        self._prepared: Prepared | None = None

    @hookimpl
    def mtb_worker_started(self, ctx: RankContext, folder: Path) -> None:
        self._rank = ctx.rank
        self._note("worker_started", folder.is_dir())

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        self._note("run_started", info.first_step, info.started)

    @hookimpl(wrapper=True)
    def mtb_prepare(self) -> Generator[None, Prepared, Prepared]:
        self._prepared = yield
        return self._prepared

    @hookimpl
    def mtb_phase(self, phase: Phase, step: int) -> None:
        self._note("phase", phase, step)

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        assert self._prepared is not None
        parts = [p.to_local() if hasattr(p, "to_local") else p for p in self._prepared.core.parameters()]  # type: ignore[operator]
        digest = float(sum(part.detach().double().abs().sum() for part in parts))
        self._note("step", record.global_step, record.loss, record.skipped, record.samples_seen, digest)

    @hookimpl
    def mtb_evaluated(self, global_step: int, loss: float) -> None:
        self._note("evaluated", global_step, loss)

    @hookimpl
    def mtb_result(self) -> Mapping[str, Any]:
        return {"rank": self._rank}

    def _note(self, *values: object) -> None:
        with (self._folder / f"journal_{self._rank}").open("a") as file:
            file.write(json.dumps(values) + "\n")


def journal(folder: Path, rank: int = 0, kind: str | None = None) -> list[list[Any]]:
    """The lines of a `Journal`; those of one `kind` without it."""
    lines = [json.loads(line) for line in (folder / f"journal_{rank}").read_text().splitlines()]
    return lines if kind is None else [line[1:] for line in lines if line[0] == kind]


class SlowSave:
    """Sleeps in the `count`-th save, before anything is written."""

    def __init__(self, count: int) -> None:
        self._left = count

    @hookimpl
    def mtb_fault_point(self, name: str) -> None:
        if name == "writing":
            self._left -= 1
            if self._left == 0:
                time.sleep(2)


class Gives:
    """Metrics that `make(rank, step)` gives; step 0 is before the first."""

    def __init__(self, make: Callable[[int, int], Mapping[str, float]]) -> None:
        self._make = make
        self._rank = self._step = 0

    @hookimpl
    def mtb_worker_started(self, ctx: RankContext) -> None:
        self._rank = ctx.rank

    @hookimpl
    def mtb_phase(self, phase: Phase, step: int) -> None:
        if phase == "step":
            self._step = step

    @hookimpl
    def mtb_step_metrics(self) -> Mapping[str, float]:
        return self._make(self._rank, self._step)


class LeavesOut:
    """Leaves out the updates of `steps`, on `rank` (None: on all, as it must be)."""

    def __init__(self, *steps: int, rank: int | None = None) -> None:
        self._steps, self._only, self._rank = steps, rank, 0

    @hookimpl
    def mtb_worker_started(self, ctx: RankContext) -> None:
        self._rank = ctx.rank

    @hookimpl
    def mtb_before_update(self, step: int, loss: float, grad_norm: float) -> str | None:
        assert loss > 0
        assert grad_norm > 0
        return f"step {step}" if step in self._steps and self._only in {None, self._rank} else None


class Forgets:
    """Wraps the optimizer's step, and forgets to return what it got."""

    @hookimpl(wrapper=True)
    def mtb_optimizer_step(self) -> Generator[None, bool, None]:
        yield


class Mirror:
    """Keeps a tensor for each weight, which is the weight plus one when it is saved; tells whether it was so when loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rank = 0
        self._pairs: dict[str, list[tuple[Piece, torch.Tensor]]] = {}

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        self._rank = job.ctx.rank
        return (yield)

    @hookimpl
    def mtb_plugin_state(self, state: State) -> State:
        self._pairs = {
            key: [(piece, piece.tensor + 1) for piece in pieces]
            for key, pieces in state.pieces.items()
            if key.startswith("model/")
        }
        return State(
            {key: [attrs.evolve(piece, tensor=own) for piece, own in pairs] for key, pairs in self._pairs.items()},
            {"saved": True},
        )

    @hookimpl
    def mtb_plugin_state_loaded(self, state: Mapping[str, Any]) -> None:
        pairs = [pair for pairs in self._pairs.values() for pair in pairs]
        right = [torch.equal(piece.tensor + 1, own) for piece, own in pairs]
        (self._folder / f"loaded_{self._rank}").write_text(json.dumps([len(right) > 0, all(right), dict(state)]))
