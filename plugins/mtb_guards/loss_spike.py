"""Run plugin ``loss-spike``: goes back to a checkpoint after a spike, or leaves the update out. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from mtb_core import Control, Phase, RunInfo, StepRecord, hookimpl

from .options import LossSpikeOptions


class LossSpike:
    """A value above `factor` times the median of the last `window` values is a spike; it is not one of them.

    All ranks see the same values and decide alike. Its state is in checkpoints. How often it has acted is not taken back
    when the run goes back, and a checkpoint is saved after the first step from there, so that neither that number nor
    the place in the data is lost by a crash.
    """

    def __init__(self, options: LossSpikeOptions) -> None:
        self._options = options
        self._values: deque[float] = deque(maxlen=options.window)
        self._acted = self._left_out = 0
        # Of a request that the run may not have got to: a stop goes first.
        self._asked: dict[str, Any] | None = None
        self._control: Control | None = None

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """Learn how to ask; ask once more for what the run was stopped before."""
        self._control = info.control
        self._ask()

    @hookimpl
    def mtb_phase(self, phase: Phase) -> None:
        """Start anew after loading, which brings a past of its own. Going back is worth a checkpoint."""
        if phase == "load":
            self._values.clear()
            self._asked = None
            if self._control is not None:
                self._control.save()

    @hookimpl
    def mtb_before_update(self, step: int, loss: float, grad_norm: float) -> str | None:
        """Leave out the update of a spike."""
        if self._options.action != "skip":
            return None
        reason = self._spike(step, loss if self._options.watch == "loss" else grad_norm)
        if reason is not None:
            self._acted, self._left_out = self._acted + 1, step
        return reason

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        """Go back after a spike; remember what is none."""
        value = record.loss if self._options.watch == "loss" else record.grad_norm
        if not math.isfinite(value) or self._asked is not None or record.global_step == self._left_out:
            return
        reason = self._spike(record.global_step, value) if self._options.action == "rollback" else None
        if reason is None:
            self._values.append(value)
            return
        self._acted += 1
        self._asked = {"reason": reason, "before": record.global_step}
        self._ask()

    @hookimpl
    def mtb_plugin_state(self) -> Mapping[str, Any]:
        """Past values, and what was done about spikes."""
        return {"values": list(self._values), "acted": self._acted, "asked": self._asked}

    @hookimpl
    def mtb_plugin_state_loaded(self, state: Mapping[str, Any]) -> None:
        """Take up the past of the checkpoint; where the run went back, the number of acts stays."""
        self._values.extend(state["values"])
        self._acted = max(self._acted, state["acted"])
        if self._control is None:  # resumed; a run that goes back has done what was asked
            self._asked = state["asked"]

    @hookimpl
    def mtb_result(self) -> Mapping[str, Any]:
        """Number of its acts, for the result."""
        return {"acted": self._acted, "at_most": self._options.at_most}

    def _spike(self, step: int, value: float) -> str | None:
        """Reason if `value` of `step` is a spike to act on; None if it is none, or enough has been done."""
        options = self._options
        if len(self._values) < options.window or self._acted >= options.at_most:
            return None
        median = statistics.median(self._values)
        if not value > options.factor * median > 0:
            return None
        what = "loss" if options.watch == "loss" else "gradient norm"
        return f"loss-spike: {what} {value:.6g} of step {step} is more than {options.factor:g} times the median {median:.6g}"

    def _ask(self) -> None:
        if self._asked is not None and self._control is not None:
            self._control.roll_back(
                self._asked["reason"], before=self._asked["before"], leave_out=self._options.leave_out
            )
