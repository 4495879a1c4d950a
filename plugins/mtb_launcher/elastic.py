"""Start the ranks of this node through torch's elastic agent and see them through to their end.

The agent (rendezvous, ranks, restarts, exit barrier) is torch's `SimpleElasticAgent`; this module gives it worker
processes of our own, because its stock ones neither die with the launcher nor end within seconds of a failure.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from mtb_core import ConfigError, RunFailed
from mtb_core.launch import STOP_SIGNALS, Failure, Insistence, LaunchOutcome, LaunchSpec, first_cause


class LauncherSignals:
    """Signals that the launcher has got and not yet passed on; `wake` becomes readable when there are any.

    Attributes:
        first: name of the first one; it came at `asked_at`, seconds on the monotonic clock.
        killing: Ctrl-C came twice.
        insisting: SIGTERM came again; whoever acts on it takes it back.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        self.asked_at = 0.0
        self.killing = False
        self.insisting = False
        self._insistence = Insistence()
        self._breakable = False
        self._pending: list[int] = []
        self.wake, self._waker = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self._waker, False)

    def take(self) -> list[int]:
        """Signals to pass on, each once."""
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            return []
        taken, self._pending = self._pending, []
        return taken

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Meanwhile a signal raises torch's `SignalException`: there is no worker to pass it on to."""
        self._breakable = True
        try:
            yield
        finally:
            self._breakable = False

    def raise_first(self) -> None:
        """Raise torch's `SignalException` if there was a signal."""
        from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415

        if self.first is not None:
            raise SignalException(f"stopped by {self.first}", sigval=signal.Signals[self.first])

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Note stop signals instead of dying from them; the former handlers come back afterwards."""
        here = threading.current_thread() is threading.main_thread()
        former = {number: signal.signal(number, self._note) for number in STOP_SIGNALS} if here else {}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            os.close(self.wake)
            os.close(self._waker)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self.first == "SIGINT":
            self.killing = True
        if number == signal.SIGTERM and self._insistence.again():
            self.insisting = True
        if self.first is None:
            self.first, self.asked_at = name, time.monotonic()
        self._pending.append(number)
        with suppress(BlockingIOError):  # it is awake
            os.write(self._waker, b"s")
        if self._breakable:
            self.raise_first()


def launch(spec: LaunchSpec) -> LaunchOutcome:
    """Start the ranks and wait for their end; no process of theirs is left when this returns.

    Signals that this process gets meanwhile: SIGTERM, SIGUSR1 and the first Ctrl-C are passed on to the ranks, which
    agree on a step and leave; a second Ctrl-C ends them at once. Where they do not hear, because one of them hangs,
    their stacks are written to their logs after a while, and a second SIGTERM ends them, but for those that save. If this process dies, by whatever signal, the
    system kills the ranks. From other threads than the main one it works too, without handlers for signals.

    Callbacks run in the calling thread, about ten times a second.

    Raises:
        ConfigError: there can be no folder `log_dir`.
        RunFailed: nodes could not meet.
    """
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous.api import RendezvousError  # noqa: PLC0415

    from .agent import Agent  # noqa: PLC0415  (imports torch)

    _make_folder(spec.log_dir)
    signals = LauncherSignals()
    with _quiet(debug=spec.debug), signals.catching():
        agent = None
        try:
            agent = Agent(spec, signals)
            agent.run()
            agent.leave()
        except SignalException:
            pass  # before the ranks were started
        except RendezvousError as error:
            failure = None if agent is None else first_cause(agent.failures)
            if failure is None:
                raise RunFailed(_not_met(spec, error, began=agent is not None and agent.began)) from error
        return _outcome(agent, signals)


def _not_met(spec: LaunchSpec, error: Exception, *, began: bool) -> str:
    if began:
        return (
            f"This node lost the others: the store at --rdzv-endpoint {spec.rdzv_endpoint} does not answer any more. The "
            "node that hosts it has ended, or the network between them has; its own output tells more. The ranks of this "
            "node were ended."
        )
    return (
        f"The nodes could not meet at --rdzv-endpoint {spec.rdzv_endpoint}: {error} Check that {spec.min_nodes} to "
        f"{spec.max_nodes} nodes were started, that the address is the same everywhere, and that its port can be reached "
        "from all of them."
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = (
            f"The folder {folder} for the ranks' logs cannot be made: {error.strerror}. It must be a folder that may be "
            "written to: move away what is in its place, or choose another --run-dir."
        )
        raise ConfigError(msg) from error


def _outcome(agent: Any, signals: LauncherSignals) -> LaunchOutcome:
    values = {} if agent is None else agent.values
    failures = [] if agent is None else agent.failures
    restarts = 0 if agent is None else agent.restarts
    asked = signals.first or (None if agent is None else agent.stop_seen)
    failure: Failure | None = None
    reason: Literal["done", "stopped", "interrupted", "failed"] = "done"
    if signals.killing:
        reason = "interrupted"
    elif failures:
        reason, failure = "failed", first_cause(failures)
    elif asked is not None:
        reason = "interrupted" if asked == "SIGINT" else "stopped"
    return LaunchOutcome(reason, values, failure, restarts, signals.first)


@contextmanager
def _quiet(*, debug: bool) -> Iterator[None]:
    """Keep torch's messages about launching from the console: what matters of them is in the outcome.

    Its records of events go nowhere anyway, but to those who listen to every logger, as pytest does.
    """
    logger = logging.getLogger("torch.distributed.elastic")
    events = [logging.getLogger(f"torchelastic-events-{kind}") for kind in ("null", "dynamic_rendezvous")]
    if debug:
        yield
        return
    former, silence = logger.propagate, logging.NullHandler()
    disabled = [log.disabled for log in events]
    logger.propagate = False
    logger.addHandler(silence)
    for log in events:
        log.disabled = True  # its level would not do: torch sets that when it first records an event
    try:
        yield
    finally:
        for log, was in zip(events, disabled, strict=True):
            log.disabled = was
        logger.propagate = former
        logger.removeHandler(silence)
