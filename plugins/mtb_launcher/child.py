"""A worker process around its entry: it lives and dies with the launcher, logs to a file, reports its end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import pickle
import select
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

from mtb_core import World
from mtb_core.launch import STOP_SIGNALS, Failure, StopFlag, Worker, failure_of, limit_threads

_PR_SET_PDEATHSIG = 1
#: Makes a worker write its stacks to its log, also while it waits inside C code.
STACKS_SIGNAL = signal.SIGUSR2
#: Sent before the `Report`: from now on the worker must not be ended for not stopping; now it may be.
HELD, FREE = b"held", b"free"


class Gate:
    """Holds forked workers back until all of them are there.

    The first to come would connect to the store, whose thread in the launcher then looks up the peer's address under a
    lock of the C library. A worker forked in that moment has the lock as held, by nobody, and waits for it for ever.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def wait(self) -> None:
        """In a worker: return when the launcher has opened the gate, or is gone."""
        os.close(self._writer)
        os.read(self._reader, 1)
        os.close(self._reader)

    def open(self, workers: int) -> None:
        """In the launcher, once: let so many workers go."""
        os.write(self._writer, b"x" * workers)
        os.close(self._writer)
        os.close(self._reader)


@attrs.frozen
class Start:
    """All that a worker process is started with.

    Attributes:
        launcher: process id of the launcher.
        gate: holds the worker back; None where it need not wait.
        log: file for what the rank writes to file descriptors 1 and 2.
        report: for one `Report`, at the end; before it, any number of `HELD` and `FREE`.
        progress: for lines of JSON, at any time.
    """

    entry: Callable[[Any, Worker], Any]
    payload: Any
    rank: int
    local_rank: int
    world: World
    restarts: int
    attempt: str
    environment: Mapping[str, str]
    launcher: int
    gate: Gate | None
    log: Path
    report: Connection
    progress: Connection


@attrs.frozen
class Report:
    """End of a worker: `value` was returned by the entry, `stop` is the signal that asked this rank to stop."""

    value: Any = None
    failure: Failure | None = None
    stop: str | None = None


def run_worker(start: Start) -> None:
    """Body of a worker process. Signals are blocked when it begins, so that none is lost before it listens.

    A spawned process gets here after importing Python, the launcher's main module and this one. If the launcher dies
    in that time, the worker ends here.
    """
    die_with(start.launcher)
    os.setsid()  # Ctrl-C at the terminal is the launcher's to pass on
    if start.gate is not None:
        start.gate.wait()
    _write_to(start.log)
    os.environ.update(start.environment)
    faulthandler.register(STACKS_SIGNAL, 2, all_threads=True)
    with StopFlag(lambda held: start.report.send_bytes(HELD if held else FREE)).catching() as stop:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, STACKS_SIGNAL})
        report = _run(start, stop)
        _flush()
        # From here on a stop signal has nothing to stop, and must not make a failure of what is done.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        start.report.send_bytes(report)
    if pickle.loads(report).failure is not None:  # noqa: S301  (made here)
        sys.exit(1)


def _run(start: Start, stop: StopFlag) -> bytes:
    """Run the entry; the pickled `Report`."""
    try:
        limit_threads(start.world.local_size)
        worker = Worker(
            start.rank,
            start.local_rank,
            start.world,
            stop,
            "mtb",
            start.restarts,
            Progress(start.progress),
            start.attempt,
        )
        # Plain pickle: multiprocessing's would hand tensors over as shared memory, which ends with this process.
        return pickle.dumps(Report(start.entry(start.payload, worker), stop=stop.requested))
    except BaseException as error:  # noqa: BLE001  (whatever it is, the launcher is told)
        return pickle.dumps(Report(failure=failure_of(error, start.rank), stop=stop.requested))


def call_pickled(work: bytes, worker: Worker) -> Any:
    """Call the entry that is pickled in `work`, with the payload beside it."""
    entry, payload = pickle.loads(work)  # noqa: S301  (made by the launcher)
    return entry(payload, worker)


class Progress:
    """Hands small mappings to the launcher; never blocks, never fails."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection  # owns the descriptor
        self._descriptor = connection.fileno()
        os.set_blocking(self._descriptor, False)

    def __call__(self, fields: dict[str, Any]) -> None:
        """Send `fields` if there is room; writes of up to PIPE_BUF bytes are whole or not at all."""
        line = json.dumps(fields, default=str).encode() + b"\n"
        if len(line) <= select.PIPE_BUF:
            with contextlib.suppress(OSError):  # full, or the launcher is gone: progress is not worth more
                os.write(self._descriptor, line)


def die_with(launcher: int) -> None:
    """Have the system kill this process when the launcher's thread that started it ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before that call
        os._exit(1)


def _write_to(log: Path) -> None:
    """Send standard output and error, also of C code, to the end of `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # New objects: a forked one may hold a lock or text of another thread of the launcher.
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)  # noqa: SIM115
    faulthandler.enable(2)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    flush_c()


def flush_c() -> None:
    """Write out what C code has in its buffers; worker processes end without doing so."""
    ctypes.CDLL(None).fflush(None)
