"""Run plugin ``ema``: an exponential moving average of the weights, sharded as they are."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import attrs
import torch

from mtb_core import Control, Loss, Phase, Prepared, RunInfo, State, hookimpl

from .options import EmaOptions


class Ema:
    """After each update that was applied, ``average = decay * average + (1 - decay) * weights``.

    It begins as the weights of the first step, or those of a checkpoint that has no average. Its tensors mirror the
    trainable parameters in the strategy's `State`, so that every rank averages what it holds, without communication,
    and checkpoints hold them as ``plugins/ema/model/NAME``. They are fp32 where the weights are narrower.
    """

    def __init__(self, options: EmaOptions) -> None:
        self._options = options
        self._trainable: frozenset[str] = frozenset()
        self._weights: list[torch.Tensor] = []
        self._average: list[torch.Tensor] = []
        self._begun = False
        self._updates = 0
        self._control: Control | None = None

    @hookimpl(wrapper=True)
    def mtb_prepare(self) -> Generator[None, Prepared, Prepared]:
        """Learn which parameters are trained."""
        prepared = yield
        names = (name for name, parameter in prepared.core.named_parameters() if parameter.requires_grad)
        self._trainable = frozenset(f"model/{name}" for name in names)
        return prepared

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """Learn how to have the strategy renew what depends on its weights."""
        self._control = info.control

    @hookimpl
    def mtb_phase(self, phase: Phase) -> None:
        """Begin the average anew if the loaded checkpoint has none."""
        if phase == "load":
            self._begun, self._updates = False, 0

    @hookimpl
    def mtb_plugin_state(self, state: State) -> State:
        """The average, in the shape of the weights, which are seen here for the rest of the trial."""
        pieces = {key: parts for key, parts in state.pieces.items() if key in self._trainable}
        self._weights = [part.tensor for parts in pieces.values() for part in parts]
        if not self._average:
            self._average = [_widened(weight) for weight in self._weights]
        average = iter(self._average)
        own = {key: [attrs.evolve(part, tensor=next(average)) for part in parts] for key, parts in pieces.items()}
        return State(own, {"updates": self._updates})

    @hookimpl
    def mtb_plugin_state_loaded(self, state: Mapping[str, Any]) -> None:
        """The tensors have been filled."""
        self._begun, self._updates = True, int(state["updates"])

    @hookimpl(wrapper=True)
    def mtb_optimizer_step(self) -> Generator[None, bool, bool]:
        """Follow the weights."""
        self._begin()
        applied = yield
        if applied:
            with torch.no_grad():
                weights = [
                    weight.to(average.dtype) for weight, average in zip(self._weights, self._average, strict=True)
                ]
                torch._foreach_lerp_(self._average, weights, 1.0 - self._options.decay)
            self._updates += 1
        return applied

    @hookimpl(wrapper=True)
    def mtb_evaluate(self) -> Generator[None, Loss | None, Loss | None]:
        """Evaluate with the average in place of the weights, and put them back."""
        if not self._options.evaluate or self._control is None:
            return (yield)
        self._begin()
        held = [weight.clone() for weight in self._weights]
        self._set(self._average)
        loss = yield
        self._set(held)
        return loss

    @hookimpl
    def mtb_result(self) -> Mapping[str, Any]:
        """Number of updates in the average, for the result."""
        return {"decay": self._options.decay, "updates": self._updates}

    def _begin(self) -> None:
        if not self._begun:
            for average, weight in zip(self._average, self._weights, strict=True):
                average.copy_(weight)
            self._begun = True

    def _set(self, values: list[torch.Tensor]) -> None:
        assert self._control is not None
        for weight, value in zip(self._weights, values, strict=True):
            weight.copy_(value)
        self._control.renew_weights()


def _widened(weight: torch.Tensor) -> torch.Tensor:
    """A tensor of its own like `weight`, at least fp32."""
    return weight.clone() if weight.dtype == torch.float64 else weight.float().clone()
