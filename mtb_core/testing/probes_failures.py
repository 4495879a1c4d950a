"""Probes for checks of failures: what goes wrong on one rank, in the middle of a step."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch.utils._pytree import tree_map_only

from mtb_core.api.hooks import hookimpl
from mtb_core.api.values import Prepared

from .drills import SignalAt
from .episodes import Probe
from .stage import Stage

_MARK = "MTB_KIT_MARK"
#: What was told to end, with its rank, may take so long to be gone.
_SETTLE_S = 2.0


class RaisedOnPurpose(Exception):
    """What `FailInForward` raises."""


@attrs.frozen
class NanInOutput(Probe):
    """Makes every output of the model NaN on `rank` in `step`, and so the loss and every gradient."""

    rank: int
    step: int

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _NanInOutput(stage, self)


class _NanInOutput:
    def __init__(self, stage: Stage, where: NanInOutput) -> None:
        self._stage, self._step, self._here = stage, where.step, stage.trace.rank == where.rank

    @hookimpl(wrapper=True)
    def mtb_prepare(self) -> Generator[None, Prepared, Prepared]:
        prepared = yield
        if self._here:
            prepared.module.register_forward_hook(self._spoil)
        return prepared

    def _spoil(self, module: torch.nn.Module, _arguments: Any, output: Any) -> Any:
        if module.training and self._stage.step == self._step:
            return tree_map_only(torch.Tensor, lambda tensor: tensor * float("nan"), output)
        return output


@attrs.frozen
class InfinityInBackward(Probe):
    """Makes every gradient infinite or NaN on `rank` from `step` on, with a loss that is right.

    From the step on, because core then does it once more to see whose gradient it was.
    """

    rank: int
    step: int

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _InfinityInBackward(stage, self)


class _InfinityInBackward:
    def __init__(self, stage: Stage, where: InfinityInBackward) -> None:
        self._stage, self._step, self._here = stage, where.step, stage.trace.rank == where.rank

    @hookimpl(wrapper=True)
    def mtb_prepare(self) -> Generator[None, Prepared, Prepared]:
        prepared = yield
        if self._here:
            prepared.module.register_forward_hook(self._spoil)
        return prepared

    def _spoil(self, _module: torch.nn.Module, _arguments: Any, output: Any) -> Any:
        if torch.is_grad_enabled() and self._stage.step >= self._step:
            return tree_map_only(torch.Tensor, _with_infinite_gradient, output)
        return output


def _with_infinite_gradient(tensor: torch.Tensor) -> torch.Tensor:
    same = tensor.view_as(tensor)
    same.register_hook(lambda gradient: gradient * float("inf"))
    return same


@attrs.frozen
class FailInForward(Probe):
    """On `rank`, the first forward of `step` raises `RaisedOnPurpose` or, with `kill`, the process is killed.

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
        if self._here:
            prepared.module.register_forward_pre_hook(self._fail)
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
        # To find out whose gradient it was core does a step's micro-batches once more, which counts as one more here.
        if exit_reason == "failed" and self._stage.step >= self._step and self._stage.prepared is not None:
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
