"""Requests of a run plugin to its run."""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs


@attrs.frozen
class RollBack:
    """A request to go back; see `Control.roll_back`."""

    reason: str
    before: int
    leave_out: int | None


@attrs.define
class Requests:
    """The requests of one rank since it was last asked; None or False where there is none."""

    finish: str | None = None
    stop: str | None = None
    skip: str | None = None
    save: bool = False
    back: RollBack | None = None


def _nothing_to_renew() -> None:
    """There is no strategy."""


class Control:
    """Requests of run plugins to the run. A sink gets none: it only observes.

    Any rank may ask, at any time, from any hook or thread; the request of one rank is enough. The ranks agree on it in
    the all-reduce of the step during which it was made, or of the next one. Then all ranks act on it after that step,
    alike. What is asked in ``mtb_phase`` as a step begins, or before, reaches that step.

    Of two requests of one kind the first one counts, that of the lowest rank. Of several kinds, `stop` goes before
    `roll_back`, and that before `finish` and `save`, which are void then: what they were about is undone. A signal goes
    before all of them. A request that did not get its turn is dropped; whoever still wants it asks again, also after a
    resume.

    Args:
        renew: what `renew_weights` calls.
    """

    def __init__(self, renew: Callable[[], None] = _nothing_to_renew) -> None:
        self._renew = renew
        self._lock = threading.Lock()
        self._requests = Requests()

    def finish(self, reason: str) -> None:
        """End the training as complete: a checkpoint (with ``--checkpoint-dir``), exit reason ``done``, code 0.

        `reason` is the result's ``stop_reason``.
        """
        with self._lock:
            self._requests.finish = self._requests.finish or reason

    def stop(self, reason: str) -> None:
        """Stop the training, to be resumed: a checkpoint (with ``--checkpoint-dir``), exit reason ``stopped``, code 4."""
        with self._lock:
            self._requests.stop = self._requests.stop or reason

    def save(self) -> None:
        """Save a checkpoint after the step. Does nothing without ``--checkpoint-dir``."""
        with self._lock:
            self._requests.save = True

    def skip(self, reason: str) -> None:
        """Leave out the update of the step: its batch is consumed, the weights stay, its record says ``skipped``.

        For what one rank knows. What follows from the step's own loss or gradient norm is known to all ranks, and too
        late for a request: see ``mtb_before_update``.
        """
        with self._lock:
            self._requests.skip = self._requests.skip or reason

    def roll_back(self, reason: str, *, before: int, leave_out: int | None = None) -> None:
        """Load this training's newest complete checkpoint of a step below `before`.

        Newer checkpoints are put aside under another name, so that no later resume takes them. The run fails on all
        ranks if there is no such checkpoint.

        Args:
            leave_out: how many batches after the checkpoint's are left out; 0 takes the same ones again. None: all that
                were taken since, so that the run goes on with data it has not seen.
        """
        with self._lock:
            self._requests.back = self._requests.back or RollBack(reason, before, leave_out)

    def renew_weights(self) -> None:
        """Let the strategy derive anew what depends on its tensors, after a run plugin has written into them.

        No request: it acts at once. Called by all ranks alike, between steps or in a wrapper of ``mtb_evaluate``, for it
        may run collectives.
        """
        self._renew()

    def take(self) -> Requests:
        """The requests made since the last call. Core calls it once a step."""
        with self._lock:
            taken, self._requests = self._requests, Requests()
        return taken
