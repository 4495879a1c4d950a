"""One training as a process of its own, and what became of it."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from mtb_core import ConfigError, MtbError, redact, redact_command

from .results import Record, read_record

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_STOPPED = 4  # the exit code of what was stopped on request
#: How long a training that is told to stop may take to end its ranks, in seconds.
GRACE_S = 20.0

_EXIT_TYPES = {2: "configuration", 3: "run_failed", 4: "stopped", 130: "interrupted"}
_CUDA_OOM = re.compile(r"CUDA (?:error: )?out of memory|CUDA_ERROR_OUT_OF_MEMORY|torch\.(?:cuda\.)?OutOfMemoryError")
_HOST_OOM = re.compile(
    r"can't allocate memory|Cannot allocate memory|std::bad_alloc|\bMemoryError\b|not enough memory: you tried"
)
#: Where Linux counts processes that it killed for want of memory.
_OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/proc/vmstat")


class Stopped(MtbError):
    """This process was asked to end; the training that it waited for has been ended."""

    exit_code = _STOPPED


@contextlib.contextmanager
def ending_on_request() -> Iterator[None]:
    """While open, SIGTERM and SIGHUP raise `Stopped` where the process is, so that no training outlives it."""

    def stop(number: int, _frame: object) -> None:
        raise Stopped(f"Stopped by {signal.Signals(number).name}.")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@attrs.frozen(kw_only=True)
class Attempt:
    """What became of one training.

    Attributes:
        status: "success"; "partial": it ended early, or some trials are missing, but there are measured ones; "oom";
            "timeout"; "failed"; "failed_parse": exit code 0 without a result that can be read.
        failure_type: None where it succeeded; else "cuda_oom", "host_oom", "timeout", "no_result", "killed",
            "configuration", "run_failed", "stopped", "interrupted", or the kind of the first failure of a rank.
        reason: the first cause in words.
        exit_code: of the process; negative: the signal that ended it.
        command: as it can be typed again in the folder where the sweep was started.
        log_digest: SHA-256 of everything that it printed.
        seconds: how long it took, start and end included.
        result: what it measured; None where it wrote none.
    """

    status: str
    failure_type: str | None
    reason: str | None
    exit_code: int
    command: str
    log_digest: str
    seconds: float
    result: Record | None


def command_of(folder: Path) -> list[str]:
    """The words of the training whose settings `train` has written to `folder`."""
    return ["train", "--config", str(folder / "settings.toml"), "--run-dir", str(folder / "run"), "--quiet"]


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a training where `train` looks for them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.toml").write_text(tomli_w.dumps(dict(settings)), encoding="utf-8")


def train(folder: Path, settings: Mapping[str, Any], *, timeout_s: float | None = None) -> Attempt:
    """Run ``mtb train`` with `settings` in a process of its own; everything it leaves is in `folder`.

    Raises:
        KeyboardInterrupt: Ctrl-C; the training has been stopped first.
    """
    write_settings(folder, settings)
    words = command_of(folder)
    log = folder / "log.txt"
    kills = _kills_for_memory()
    start = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "mtb_core", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a signal reaches its ranks too, and Ctrl-C reaches it through us alone
            preexec_fn=_ending_with(os.getpid()),  # noqa: PLW1509  (this process has one thread)
        )
        timed_out = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            _end(process, signal.SIGTERM)
        except BaseException:
            _end(process, signal.SIGINT)
            raise
    seconds = time.monotonic() - start
    result = _result(folder)
    text = log.read_text(encoding="utf-8", errors="replace")
    status, kind, reason = outcome(
        process.returncode,
        result,
        text,
        trials=int(settings.get("repeat", 1)),
        timeout_s=timeout_s if timed_out else None,
        killed_for_memory=_kills_for_memory() > kills,
    )
    return Attempt(
        status=status,
        failure_type=kind,
        reason=None if reason is None else redact(reason),
        exit_code=process.returncode,
        command=redact_command(["mtb", *words]),
        log_digest=hashlib.sha256(log.read_bytes()).hexdigest(),
        seconds=seconds,
        result=result,
    )


def _ending_with(parent: int) -> Callable[[], None] | None:
    """What makes a child process be told to stop (SIGTERM) when this one is killed, where it cannot do so itself.

    Called in the child before it becomes another program. Linux alone has this (prctl(2)); None elsewhere.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def before() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # killed before the call
            os._exit(_STOPPED)

    return before


def outcome(
    exit_code: int,
    result: Record | None,
    log: str,
    *,
    trials: int = 1,
    timeout_s: float | None = None,
    killed_for_memory: bool = False,
) -> tuple[str, str | None, str | None]:
    """(status, failure type, reason) of a training that left `exit_code`, `result` and `log`; see `Attempt`."""
    failure = (None if result is None else result.get("failure")) or {}
    said = failure.get("text") or _last_words(log)
    measured = [] if result is None else [row for row in result.trials if row.get("step_time_ms") is not None]
    if timeout_s is not None:
        return "timeout", "timeout", f"it was stopped after {timeout_s:g} s"
    if exit_code == 0:
        if result is None:
            return "failed_parse", "no_result", "it ended with 0 and left no result that can be read"
        if result.execution_complete and len(measured) >= trials:
            return "success", None, None
        return "partial", "incomplete", f"{len(measured)} of {trials} trials were measured"
    if _CUDA_OOM.search(log) or _CUDA_OOM.search(said or ""):
        return "oom", "cuda_oom", said
    if killed_for_memory or _HOST_OOM.search(log):
        return "oom", "host_oom", said
    if exit_code < 0 and not failure.get("text"):
        said = f"it was ended by {_signal(-exit_code)}" + (f"; its last words: {said}" if said else "")
    kind = failure.get("kind") or _EXIT_TYPES.get(exit_code) or ("killed" if exit_code < 0 else "unknown")
    return ("partial" if measured else "failed"), kind, said


def _signal(number: int) -> str:
    """The name of a signal, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(log: str) -> str | None:
    """The error that `mtb` printed, or the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("mtb: error:")]
    return (errors or lines or [None])[-1]  # type: ignore[list-item]


def _result(folder: Path) -> Record | None:
    try:
        return read_record(folder / "run" / "result.json")
    except ConfigError:
        return None


def _kills_for_memory() -> int:
    """How often processes were killed for want of memory here so far; 0 where that is not told."""
    count = 0
    for place in _OOM_COUNTERS:
        try:
            text = Path(place).read_text(encoding="utf-8")
        except OSError:
            continue
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        count += int(found[1]) if found else 0
    return count


def _end(process: subprocess.Popen[bytes], first: signal.Signals) -> None:
    """Ask the training and its ranks to end, and end them."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, first)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
