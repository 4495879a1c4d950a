"""Step times of two trainings that take turns on one machine; used by `side_by_side.py`.

Both are started, and stopped (SIGSTOP) after their first steps. From then on one of them may go on for a window while
the other waits. What slows the machine for longer than a window slows both.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
from sides import Side, Unusable, end

#: Windows of each side, and the least that one window has of steps and of seconds.
WINDOWS = 12
STEPS = 10
WINDOW_S = 0.1
#: No further windows begin when so much time has passed (s).
MOST_S = 20.0
_POLL_S = 0.005


@attrs.define
class Runner:
    """A training that is under way, and its files; of its metrics `_read` bytes are read."""

    name: str
    process: subprocess.Popen[str]
    run: Path
    log: Path
    _read: int = 0

    def go_on(self, steps: int, seconds: float, most_s: float) -> list[float]:
        """Let it train for at least so many steps and seconds, then stop it; the times of the steps (ms).

        The first step does not count: it may hold the time for which the training was stopped.

        Raises:
            Unusable: it ended, or took longer than `most_s`.
        """
        began = time.monotonic()
        times: list[float] = []
        self._send(signal.SIGCONT)
        while len(times) <= steps or time.monotonic() < began + seconds:
            if time.monotonic() > began + most_s:
                raise Unusable(f"{self.name}: the timed training took more than {most_s:g} s for {steps} steps.")
            time.sleep(_POLL_S)
            self._check()
            times += self._new_times()
        self._send(signal.SIGSTOP)
        return (times + self._new_times())[1:]

    def _check(self) -> None:
        if self.process.poll() is not None:
            said = " ".join(self.log.read_text(encoding="utf-8", errors="replace").split()[-60:])
            raise Unusable(f"{self.name}: the timed training ended with {self.process.returncode}: {said}")

    def _send(self, number: signal.Signals) -> None:
        self._check()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _new_times(self) -> list[float]:
        """Step times in the metrics lines that one rank has written since the last call."""
        file = min((self.run / "metrics").glob("*.jsonl"), default=None)
        if file is None:
            return []
        with file.open("rb") as stream:
            stream.seek(self._read)
            lines = [line for line in stream if line.endswith(b"\n")]
        self._read += sum(map(len, lines))
        return [float(json.loads(line)["step_time_ms"]) for line in lines]


def step_times(
    sides: Sequence[Side], arguments: Sequence[str], folder: Path, timeout_s: float
) -> dict[str, list[float]]:
    """Median step times (ms) in the windows of each side, by its name; those of one index were taken in turn.

    Args:
        sides: the two.
        arguments: of ``mtb``: a training without end and without checkpoints. ``--run-dir`` is added.
        folder: an existing one, for the runs.
        timeout_s: for the start of one training.

    Raises:
        Unusable: a training ended by itself, or was too slow.
    """
    runners: list[Runner] = []
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    try:
        for side in sides:
            runners.append(_start(side, arguments, folder))
            runners[-1].go_on(STEPS, 0.0, timeout_s)
        began = time.monotonic()
        for _ in range(WINDOWS):
            for runner in runners:
                found[runner.name].append(statistics.median(runner.go_on(STEPS, WINDOW_S, timeout_s)))
            runners.reverse()
            if time.monotonic() > began + MOST_S:
                break
    finally:
        for runner in runners:
            end(runner.process)
    return found


def _start(side: Side, arguments: Sequence[str], folder: Path) -> Runner:
    run, log = folder / f"timed-{side.name}", folder / f"timed-{side.name}.log"
    command, env = side.command([*arguments, "--run-dir", str(run)])
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            text=True,
            start_new_session=True,
        )
    return Runner(side.name, process, run, log)
