"""How a run plugin acts on its run."""

from __future__ import annotations

import attrs


@attrs.frozen
class RollBack:
    """A request to go back; see `Control.roll_back`."""

    reason: str
    before: int
    leave_out: int


@attrs.define
class Requests:
    """The requests of one rank since it was last asked; None or False where there is none."""

    finish: str | None = None
    stop: str | None = None
    skip: str | None = None
    save: bool = False
    back: RollBack | None = None


class Control:
    """Requests of run plugins to the run. A sink gets none: it only observes.

    Any rank may ask, at any time, from any hook or thread; the request of one rank is enough. The ranks agree on it in
    the all-reduce of the step during which it was made, or of the next one. Then all ranks act on it after that step,
    alike. Of two requests of one kind the first one counts.
    """

    def __init__(self) -> None:
        self._requests = Requests()

    def finish(self, reason: str) -> None:
        """End the training as complete: exit reason ``done``, exit code 0; `reason` is the result's ``stop_reason``."""
        self._requests.finish = self._requests.finish or reason

    def stop(self, reason: str) -> None:
        """Stop the training, to be resumed: a checkpoint (with ``--checkpoint-dir``), exit reason ``stopped``, code 4."""
        self._requests.stop = self._requests.stop or reason

    def save(self) -> None:
        """Save a checkpoint after the step. Does nothing without ``--checkpoint-dir``."""
        self._requests.save = True

    def skip(self, reason: str) -> None:
        """Leave out the update of the step: its batch is consumed, the weights stay, its record says ``skipped``."""
        self._requests.skip = self._requests.skip or reason

    def roll_back(self, reason: str, *, before: int, leave_out: int = 0) -> None:
        """Load the newest complete checkpoint of a step below `before`, and leave out the next `leave_out` batches.

        Newer checkpoints are put aside under another name, so that no later resume takes them. The run fails on all
        ranks if there is no such checkpoint.
        """
        self._requests.back = self._requests.back or RollBack(reason, before, leave_out)

    def take(self) -> Requests:
        """The requests made since the last call. Core calls it once a step."""
        taken, self._requests = self._requests, Requests()
        return taken
