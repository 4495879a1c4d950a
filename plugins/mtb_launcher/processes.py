"""The worker processes of one attempt, as the launcher sees them."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from typing import Any

import attrs

from mtb_core.launch import STOP_SIGNALS, Failure, available_cores, exit_failure, threads_for

from .child import FREE, HELD, STACKS_SIGNAL, Report, Start, call_pickled, flush_c, run_worker
from .logs import Tail

#: Time for a worker that has handed over its result to end; afterwards it is ended.
LEAVE_S = 10.0


class WorkerProcess:
    """One worker process with the launcher's ends of its pipes."""

    def __init__(self, start: Callable[[Connection, Connection], Start], method: str) -> None:
        """Start the process; `start` makes its start value from the two ends that it is to write to."""
        context = multiprocessing.get_context(method)
        self._report, child_report = context.Pipe(duplex=False)
        self._progress, child_progress = context.Pipe(duplex=False)
        os.set_blocking(self._progress.fileno(), False)
        value = start(child_report, child_progress)
        if method != "fork":
            # Made again (which imports torch, for seconds) where the worker already listens and dies with the launcher.
            value = attrs.evolve(value, entry=call_pickled, payload=pickle.dumps((value.entry, value.payload)))
        self.rank = value.rank
        self.report: Report | None = None
        #: Whether it must not be ended for not stopping; see `StopFlag`.
        self.held = False
        self._tail = Tail(value.log)
        self._partial = b""
        self._reported_at: float | None = None
        self._killed = False
        # Not a daemon: a rank may have processes of its own, for data.
        self.process: BaseProcess = context.Process(target=run_worker, args=(value,), name=f"rank {value.rank}")  # type: ignore[attr-defined]
        if method != "fork":
            ensure_running()  # before signals are blocked: starting Python's tracker would unblock them again
        _start_quietly(self.process)
        child_report.close()
        child_progress.close()

    @property
    def waitables(self) -> list[Any]:
        """Objects that become ready when there is news of this worker's end."""
        return [self.process.sentinel] + ([self._report] if self.report is None and not self._report.closed else [])

    def poll(self) -> None:
        """Take in the report and the end of the process, if they are there."""
        self._take_report()
        if self.report is not None and self._reported_at is None:
            self._reported_at = time.monotonic()
        late = self._reported_at is not None and time.monotonic() > self._reported_at + LEAVE_S
        if late and not self.exited:
            self.kill()

    def _take_report(self) -> None:
        if self.report is not None or self._report.closed:
            return
        exited = self.process.exitcode is not None  # asked first: whatever it wrote is then there
        try:
            while self.report is None and self._report.poll():
                message = self._report.recv_bytes()
                if message in (HELD, FREE):
                    self.held = message == HELD
                else:
                    self.report = pickle.loads(message)  # noqa: S301  (made by our own process)
            if self.report is None and exited:
                self._report.close()
        except (EOFError, OSError):
            self._report.close()
        except Exception as error:  # noqa: BLE001  (a value that can be pickled but not made again)
            failure = Failure(self.rank, type(error).__name__, f"Its result cannot be read: {error}")
            self.report = Report(failure=failure)

    @property
    def exited(self) -> bool:
        """True if the process has ended."""
        return self.process.exitcode is not None

    @property
    def done(self) -> bool:
        """True if the worker has ended well."""
        return self.exited and self.report is not None and self.failure is None

    @property
    def failure(self) -> Failure | None:
        """The worker's failure; None while there is none."""
        if self.report is not None:
            if self.report.failure is not None:
                return self.report.failure
            failed = bool(self.process.exitcode)
        else:
            failed = self.exited
        if not failed or self._killed:  # killed by the launcher: its end says nothing
            return None
        assert self.process.exitcode is not None
        return exit_failure(self.rank, self.process.exitcode)

    def signal(self, number: int) -> None:
        """Send a signal to the worker alone."""
        if self.process.pid is not None and not self.exited:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the worker and every process it has started, at once."""
        if self.process.pid is None:
            return
        self._killed = self._killed or not self.exited
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # gone, or has not made its own group yet
            self.process.kill()

    def progress(self) -> Iterable[dict[str, Any]]:
        """Progress messages that have arrived."""
        try:
            while chunk := os.read(self._progress.fileno(), 1 << 16):
                *whole, self._partial = (self._partial + chunk).split(b"\n")
                yield from map(json.loads, whole)
        except BlockingIOError:
            return

    def lines(self) -> Iterable[str]:
        """New whole lines of the worker's log; all that is left of it once it has ended."""
        return self._tail.lines(end=self.exited)

    def close(self) -> None:
        """Release what belongs to the ended process."""
        self._report.close()
        self._progress.close()
        if self.exited:
            self.process.close()


def wait_for_news(workers: Iterable[WorkerProcess], extra: Any, timeout: float) -> None:
    """Return when a worker reports or ends, when `extra` is readable, or after `timeout` seconds."""
    wait([extra, *(w for worker in workers if not worker.exited for w in worker.waitables)], timeout)


def pick_method(asked: str, nproc: int, nodes: int) -> str:
    """``"fork"`` where that is safe, else ``"spawn"``, unless one of them was asked for.

    Forking is unsafe where other threads may hold locks, as that of the store does whenever somebody on another node
    connects; where CUDA is in use (its state does not survive a fork); and where this process has computed with several
    threads and ranks will too: OpenMP's threads are missing after a fork, and the first large operation would wait for
    them for ever.
    """
    if asked != "auto":
        return asked
    import torch  # noqa: PLC0415  (torch is imported when it is used)

    safe = (
        "fork" in multiprocessing.get_all_start_methods()
        and os.uname().sysname == "Linux"
        and threading.active_count() == 1
        and nodes == 1
        and (threads_for(nproc) == 1 or not _has_computed())
        and not torch.cuda.is_initialized()
    )
    return "fork" if safe else "spawn"


def _has_computed() -> bool:
    """True if this process has more threads than those that importing numpy starts (they do survive a fork)."""
    blas = available_cores() - 1 if "numpy" in sys.modules else 0
    return len(os.listdir("/proc/self/task")) > 1 + blas  # noqa: PTH208  (only counted)


def _start_quietly(process: BaseProcess) -> None:
    """Start with signals blocked, so that the worker gets those that come before it listens."""
    flush_c()
    # A forked worker need not search what it inherits for garbage: that would copy all of it, page by page.
    freeze = gc.get_freeze_count() == 0
    if freeze:
        gc.freeze()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, STACKS_SIGNAL})
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, also of that of torch's store, which is idle until the gate opens.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        if freeze:
            gc.unfreeze()
