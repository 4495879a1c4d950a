"""Probes for checks of failures: what goes wrong on one rank, in the middle of a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_map_only

from mtb_core.api.hooks import hookimpl
from mtb_core.api.values import Prepared

from .drills import SignalAt
from .episodes import Probe
from .stage import Stage


class RaisedOnPurpose(Exception):
    """What `RaiseInForward` raises."""


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
class FailInForward(Probe):
    """On `rank`, the first forward of `step` raises `RaisedOnPurpose` or, with `kill`, the process is killed."""

    rank: int
    step: int
    kill: bool = False

    def observer(self, stage: Stage) -> object:
        """See the class."""
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
