"""Probes that several checks use: things to watch, and things that go wrong on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import attrs
import torch

from mtb_core.api.hooks import hookimpl
from mtb_core.api.values import Prepared
from mtb_core.api.work import Loss, MicroBatch, StepWork

from .episodes import Probe
from .stage import Stage


@attrs.frozen
class Inputs(Probe):
    """Keeps what core gives this rank in each step: its positions under ``positions``, by step the inputs under ``inputs``.

    Inputs are int64 [samples of all micro-batches, positions].
    """

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _Inputs(stage)


class _Inputs:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._seen: dict[int, torch.Tensor] = stage.trace.notes.setdefault("inputs", {})

    @hookimpl(wrapper=True)
    def mtb_accumulate(self, prepared: Prepared, work: StepWork) -> Generator[None, Loss, Loss]:
        positions = prepared.positions
        self._stage.trace.notes["positions"] = None if positions is None else [int(p) for p in positions]
        self._seen[self._stage.step] = work.inputs.detach().cpu().flatten(0, 1).clone()
        return (yield)


@attrs.frozen
class RaiseInSyncContext(Probe):
    """Before the last micro-batch of `step`, enters an unsynchronised context and leaves it by an exception.

    Notes ``raised`` where there was one.
    """

    step: int

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _RaiseInSyncContext(stage, self.step)


class _OnPurpose(Exception):
    pass


class _RaiseInSyncContext:
    def __init__(self, stage: Stage, step: int) -> None:
        self._stage, self._step = stage, step

    @hookimpl(wrapper=True)
    def mtb_micro_batch(
        self, prepared: Prepared, micro: MicroBatch
    ) -> Generator[None, contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        if micro.index == micro.count - 1 and self._stage.step == self._step:
            self._stage.trace.notes["raised"] = True
            unsynchronised = MicroBatch(0, micro.count, sync=False)
            with contextlib.suppress(_OnPurpose), self._stage.strategy.micro_batch(prepared, unsynchronised):
                raise _OnPurpose
        return (yield)


def all_modules(prepared: Prepared) -> set[torch.nn.Module]:
    """`core` may only name parameters, and `module` may not know what it calls as its own; so those of both."""
    return {*prepared.module.modules(), *prepared.core.modules()}


@attrs.frozen
class Modes(Probe):
    """Notes the ``training`` flags of all modules at each forward, under ``modes``: in training, in evaluation."""

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _Modes(stage)


class _Modes:
    def __init__(self, stage: Stage) -> None:
        self._seen: dict[str, set[bool]] = stage.trace.notes.setdefault(
            "modes", {"training": set(), "evaluation": set()}
        )

    @hookimpl(wrapper=True)
    def mtb_prepare(self) -> Generator[None, Prepared, Prepared]:
        prepared = yield
        for module in all_modules(prepared):
            if module is prepared.core or module is not prepared.module:  # an engine's shell has no mode of its own
                module.register_forward_pre_hook(self._note)
        return prepared

    def _note(self, module: torch.nn.Module, _arguments: tuple[Any, ...]) -> None:
        self._seen["training" if torch.is_grad_enabled() else "evaluation"].add(module.training)


@attrs.frozen
class Forwards(Probe):
    """Notes under ``forwards`` how often modules were called in training, all together, recomputation included."""

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _Forwards(stage)


class _Forwards:
    def __init__(self, stage: Stage) -> None:
        self._notes = stage.trace.notes
        self._notes["forwards"] = 0

    @hookimpl(wrapper=True)
    def mtb_prepare(self) -> Generator[None, Prepared, Prepared]:
        prepared = yield
        for module in all_modules(prepared):
            module.register_forward_pre_hook(self._count)
        return prepared

    def _count(self, module: torch.nn.Module, _arguments: tuple[Any, ...]) -> None:
        self._notes["forwards"] += module.training
