"""The gate: every rank of every contender waits here between two windows of steps until the conductor lets it go on.

So one contender works at a time although all stay alive, and windows of different contenders can be interleaved.
Nothing is measured here but the moments of leaving and arriving; CPU time is read from outside.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

#: Environment: path of the conductor's socket, name of the contender, steps of the windows (``"40,100,100"``).
SOCKET, CONTENDER, WINDOWS = "MTB_BENCH_SOCKET", "MTB_BENCH_CONTENDER", "MTB_BENCH_WINDOWS"


class Gate:
    """Call `step_done` after every step, on every rank; `total_steps` says how many steps to take."""

    def __init__(self, rank: int) -> None:
        ends, total = set(), 0
        for steps in map(int, os.environ[WINDOWS].split(",")):
            total += steps
            ends.add(total)
        self.total_steps, self._ends, self._taken = total, ends, 0
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(os.environ[SOCKET])
        self._tell({"contender": os.environ[CONTENDER], "rank": rank})
        self._left = time.monotonic()

    def step_done(self) -> None:
        """Count a step; at the end of a window report it and wait. The last window is reported without waiting."""
        self._taken += 1
        if self._taken not in self._ends:
            return
        arrived = time.monotonic()
        self._tell({"left": self._left, "arrived": arrived})
        if self._taken == self.total_steps:
            self._connection.close()
            return
        if not self._connection.recv(1):
            raise SystemExit("the benchmark's conductor is gone")
        self._left = time.monotonic()

    def _tell(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")


def total_steps() -> int:
    """How many steps the contender has to take in all."""
    return sum(map(int, os.environ[WINDOWS].split(",")))
