"""Run plugin ``early-stop``: ends the training as done. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from mtb_core import Control, Phase, RunInfo, StepRecord, hookimpl

from .options import EarlyStopOptions


@attrs.frozen
class Seen:
    """The losses so far. `waited`: evaluations or steps since the best; `last` is None where it was not finite."""

    best: float | None = None
    best_step: int = 0
    waited: int = 0
    last: float | None = None
    last_step: int = 0


class EarlyStop:
    """Asks to finish when the loss is at most the target, or has not improved for too long.

    All ranks see the same losses and ask alike. What it has seen is in checkpoints, so that a run which is resumed, or
    goes back, is as patient as one that was not interrupted.
    """

    def __init__(self, options: EarlyStopOptions) -> None:
        self._options = options
        self._seen = Seen()
        self._control: Control | None = None

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """Learn how to ask; a run that was stopped between reason and end asks once more."""
        self._control = info.control
        self._ask()

    @hookimpl
    def mtb_phase(self, phase: Phase) -> None:
        """Start anew after loading, which brings a past of its own."""
        if phase == "load":
            self._seen = Seen()

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        """A step without update has a loss too."""
        if self._options.watch == "train":
            self._see(record.global_step, record.loss)

    @hookimpl
    def mtb_evaluated(self, global_step: int, loss: float) -> None:
        """Of the whole evaluation data."""
        if self._options.watch == "eval":
            self._see(global_step, loss)

    @hookimpl
    def mtb_plugin_state(self) -> Mapping[str, Any]:
        """The losses seen so far, for checkpoints."""
        return attrs.asdict(self._seen)

    @hookimpl
    def mtb_plugin_state_loaded(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._seen = Seen(**state)

    @hookimpl
    def mtb_result(self) -> Mapping[str, Any]:
        """The best loss, and how many evaluations or steps ago it was."""
        return attrs.asdict(self._seen)

    def _see(self, step: int, loss: float) -> None:
        seen, finite = self._seen, math.isfinite(loss)
        if finite and (seen.best is None or loss < seen.best - self._options.min_delta):
            self._seen = Seen(best=loss, best_step=step, waited=0, last=loss, last_step=step)
        else:
            self._seen = attrs.evolve(seen, waited=seen.waited + 1, last=loss if finite else None, last_step=step)
        self._ask()

    def _ask(self) -> None:
        reason = self._reason()
        if reason is not None and self._control is not None:
            self._control.finish(f"early-stop: {reason}")

    def _reason(self) -> str | None:
        options, seen = self._options, self._seen
        if options.target is not None and seen.last is not None and seen.last <= options.target:
            return f"loss {seen.last:.6g} of step {seen.last_step} is at most {options.target:g}"
        if options.patience is not None and seen.waited >= options.patience:
            best = "any finite loss" if seen.best is None else f"the loss {seen.best:.6g} of step {seen.best_step}"
            what = "evaluation" if options.watch == "eval" else "step"
            return f"{seen.waited} {what}{'' if seen.waited == 1 else 's'} without improvement on {best}"
        return None
