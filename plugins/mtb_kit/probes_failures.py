"""Probes for checks of failures: what goes wrong on one rank, in the middle of a step."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch

from mtb_core.api.hooks import hookimpl
from mtb_core.api.strategy import Strategy
from mtb_core.api.values import Prepared
from mtb_core.api.work import Loss, StepWork

from .drills import SignalAt
from .episodes import Probe
from .probes import all_modules
from .stage import Stage

_MARK = "MTB_KIT_MARK"
#: What was told to end, with its rank, may take so long to be gone.
_SETTLE_S = 2.0


class RaisedOnPurpose(Exception):
    """Error that `FailInForward` raises."""


@attrs.frozen
class NanInLoss(Probe):
    """Makes the loss NaN on `rank` in `step`, and with `gradients` every gradient. `rank` must be one that counts loss."""

    rank: int
    step: int
    gradients: bool = True

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _InLoss(stage, self.rank, self.step, _nan if self.gradients else _nan_in_value)


@attrs.frozen
class InfinityInBackward(Probe):
    """Makes every gradient infinite or NaN on `rank` in `step`, with a loss that is right.

    `rank` must be one that counts loss.
    """

    rank: int
    step: int

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _InLoss(stage, self.rank, self.step, _with_infinite_gradient)


def _nan(loss: torch.Tensor) -> torch.Tensor:
    return loss * float("nan")


def _nan_in_value(loss: torch.Tensor) -> torch.Tensor:
    return loss + (loss * float("nan")).detach()


def _with_infinite_gradient(loss: torch.Tensor) -> torch.Tensor:
    same = loss.view_as(loss)
    if same.requires_grad:
        same.register_hook(lambda gradient: gradient * float("inf"))
    return same


class _InLoss:
    """Changes each loss that the strategy gets, however it schedules its forwards."""

    def __init__(self, stage: Stage, rank: int, step: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._stage, self._step, self._change = stage, step, change
        if stage.trace.rank == rank:
            stage.intercept("accumulate", self._spoiling)

    def _spoiling(self, accumulate: Callable[..., Any]) -> Callable[..., Any]:
        def spoiling(strategy: Strategy, prepared: Prepared, work: StepWork) -> Loss:
            if self._stage.step == self._step:
                work = attrs.evolve(work, forward=self._spoiled(work.forward), loss=self._spoiled(work.loss))
            found: Loss = accumulate(strategy, prepared, work)
            return found

        return spoiling

    def _spoiled(self, function: Callable[..., Loss]) -> Callable[..., Loss]:
        def spoiled(*arguments: Any) -> Loss:
            found = function(*arguments)
            return attrs.evolve(found, sum=self._change(found.sum))

        return spoiled

    @hookimpl
    def mtb_run_finished(self) -> None:
        """Every run plugin implements a hook."""


@attrs.frozen
class FailInForward(Probe):
    """On `rank`, the first forward of any module in `step` raises `RaisedOnPurpose` or, with `kill`, the process is killed.

    On every rank, what it starts from then on has `mark` in its environment, see `survivors`.
    """

    fresh: ClassVar[bool] = True

    rank: int
    step: int
    kill: bool = False
    mark: str = ""

    def observer(self, stage: Stage) -> object:
        """See the class."""
        os.environ[_MARK] = self.mark
        return _FailInForward(stage, self)


class _FailInForward:
    def __init__(self, stage: Stage, what: FailInForward) -> None:
        self._stage, self._what, self._here = stage, what, stage.trace.rank == what.rank

    @hookimpl(wrapper=True)
    def mtb_prepare(self) -> Generator[None, Prepared, Prepared]:
        prepared = yield
        for module in all_modules(prepared) if self._here else ():
            module.register_forward_pre_hook(self._fail)
        return prepared

    def _fail(self, _module: torch.nn.Module, _arguments: Any) -> None:
        if self._stage.step == self._what.step:
            if self._what.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RaisedOnPurpose("the conformance kit lets this rank fail")


@attrs.frozen
class Signalled(Probe):
    """Sends the signal `number` to `rank` when `step` was recorded."""

    fresh: ClassVar[bool] = True

    rank: int
    step: int
    number: int

    def observer(self, stage: Stage) -> object:  # noqa: ARG002  (as every probe)
        """See the class."""
        return SignalAt(self.rank, self.step, self.number)


@attrs.frozen
class StateAtEnd(Probe):
    """Keeps the state that the trial ends with as that after `step`, which may have failed by agreement."""

    step: int

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _StateAtEnd(stage, self.step)


class _StateAtEnd:
    def __init__(self, stage: Stage, step: int) -> None:
        self._stage, self._step = stage, step

    @hookimpl
    def mtb_run_finished(self, exit_reason: str) -> None:
        # A rank that failed alone must not start what the others do not take part in.
        if exit_reason == "failed" and self._stage.step == self._step and self._stage.prepared is not None:
            self._stage.keep_state(self._step)


def survivors(mark: str) -> dict[int, str]:
    """Programs with `mark` in their environment that go on running: command by process number."""
    deadline = time.monotonic() + _SETTLE_S
    while (found := _marked(f"{_MARK}={mark}".encode())) and time.monotonic() < deadline:
        time.sleep(0.05)  # nothing tells when somebody else's child has gone
    return found


def _marked(text: bytes) -> dict[int, str]:
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if text in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found[int(process.name)] = command
    return found
