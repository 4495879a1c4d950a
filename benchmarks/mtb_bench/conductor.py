"""The conductor: starts contenders, lets one of them take a window of steps at a time, and measures from outside."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs

from .gate import CONTENDER, SOCKET, WINDOWS


@attrs.frozen
class Window:
    """What a contender needed for one window, per step.

    Attributes:
        wall_ms: from the first rank that left the gate to the last that came back.
        cpu_ms: CPU time of all its processes, launchers included.
    """

    wall_ms: float
    cpu_ms: float


@attrs.define
class _Running:
    process: subprocess.Popen[bytes]
    started: float
    log: Path
    warm: float = 0.0
    ranks: list[socket.socket] = attrs.field(factory=list)


class Conductor:
    """Use as a context manager; ends what it started on the way out.

    `commands` gives what to start by contender; each has to bring `nproc` ranks to the gate, whose first of `windows`
    (numbers of steps) serves as warm-up.
    """

    def __init__(
        self, commands: Mapping[str, Sequence[str]], *, nproc: int, windows: Sequence[int], env: Mapping[str, str]
    ) -> None:
        self._commands, self._nproc, self._windows, self._env = commands, nproc, windows, env
        self._running: dict[str, _Running] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start all contenders and take each through its first window (warm-up)."""
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(folder / "gate"))
            listener.listen(64)
            listener.settimeout(1)
            stack.callback(self._end)
            for name in self._commands:  # one after the other, so that starting does not crowd the machine
                self._start(name, folder, listener)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End everything."""
        self._stack.close()

    def warm_after_s(self, name: str) -> float:
        """Seconds from the start of contender `name` until the last of its ranks had done the first window."""
        running = self._running[name]
        return running.warm - running.started

    def window(self, name: str, steps: int) -> Window:
        """Let contender `name` take its next window of `steps`."""
        running = self._running[name]
        pids = _tree(running.process.pid)
        before = _cpu_s(pids)
        for rank in running.ranks:
            rank.sendall(b"g")
        reports = [_line(rank, running.log) for rank in running.ranks]
        cpu_s = _cpu_s(pids) - before
        wall_s = max(r["arrived"] for r in reports) - min(r["left"] for r in reports)
        return Window(wall_s / steps * 1e3, cpu_s / steps * 1e3)

    def _start(self, name: str, folder: Path, listener: socket.socket) -> None:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **self._env,
            SOCKET: str(folder / "gate"),
            CONTENDER: name,
            WINDOWS: ",".join(map(str, self._windows)),
        }
        log = folder / f"{name}.log"
        with log.open("wb") as out:
            started = time.monotonic()
            process = subprocess.Popen(
                self._commands[name],
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=folder,
            )
        running = self._running[name] = _Running(process, started, log)
        for _ in range(self._nproc):
            running.ranks.append(_accept(listener, running))
            assert _line(running.ranks[-1], log)["contender"] == name
        running.warm = max(_line(rank, log)["arrived"] for rank in running.ranks)

    def _end(self) -> None:
        for running in self._running.values():
            for rank in running.ranks:
                rank.close()
        for name, running in self._running.items():
            try:
                code = running.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                running.process.kill()
                code = running.process.wait()
            if code and sys.exc_info()[0] is None:
                print(f"{name} ended with {code}:\n{_tail(running.log)}", file=sys.stderr)


def _accept(listener: socket.socket, running: _Running) -> socket.socket:
    deadline = time.monotonic() + 120
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if running.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"A contender did not start:\n{_tail(running.log)}") from None
        else:
            connection.settimeout(300)
            return connection


def _line(connection: socket.socket, log: Path) -> dict[str, Any]:
    received = b""
    while not received.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            raise SystemExit(f"A contender ended early:\n{_tail(log)}")
        received += part
    message: dict[str, Any] = json.loads(received)
    return message


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def _tree(root: int) -> list[int]:
    """Process ids of `root` and all that descend from it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))

    def descend(pid: int) -> Iterator[int]:
        yield pid
        for child in children.get(pid, ()):
            yield from descend(child)

    return list(descend(root))


def _cpu_s(pids: Sequence[int]) -> float:
    """CPU time that the processes used so far, all threads (Linux numbers a process's CPU clock from its id)."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            total += time.clock_gettime((~pid << 3) | 2)
    return total
