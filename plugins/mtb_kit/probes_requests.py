"""The probe that acts on its run as a run plugin may, on one rank."""

from __future__ import annotations

from typing import Literal

import attrs

from mtb_core.api.control import Control
from mtb_core.api.hooks import hookimpl
from mtb_core.api.records import Phase, RunInfo

from .episodes import Probe
from .stage import Stage

Kind = Literal["skip", "save", "finish", "stop", "roll_back"]


@attrs.frozen
class Asks(Probe):
    """On `rank`, each of `requests` (step, kind) is made as the step begins; a second time through a step it is not.

    ``roll_back`` goes back to before that step and takes the same batches again.
    """

    rank: int
    requests: tuple[tuple[int, Kind], ...]

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _Asks(stage, self)


class _Asks:
    def __init__(self, stage: Stage, what: Asks) -> None:
        self._left = dict(what.requests) if stage.trace.rank == what.rank else {}
        self._control: Control | None = None

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        self._control = info.control

    @hookimpl
    def mtb_phase(self, phase: Phase, step: int) -> None:
        control = self._control
        if control is None or phase != "step" or step not in self._left:
            return
        kind = self._left.pop(step)
        reason = f"the conformance kit asks for it at step {step}"
        if kind == "save":
            control.save()
        elif kind == "roll_back":
            control.roll_back(reason, before=step, leave_out=0)
        else:
            getattr(control, kind)(reason)
