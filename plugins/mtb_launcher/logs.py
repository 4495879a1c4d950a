"""Whole lines from a log file that another process is writing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_CHUNK = 1 << 18
_LONGEST = 1 << 16


def innermost_calls(stacks: str) -> str:
    """Place of the main thread in a print of `faulthandler`: ``wait (queue.py:171) in next (loader.py:88)``.

    Empty where nothing was printed.
    """
    main = stacks.rpartition("(most recent call first):\n")[2]
    found = re.findall(r'^  File "(?:.*/)?(.+)", line (\d+) in (.+)$', main, re.MULTILINE)
    return " in ".join(f"{function} ({file}:{line})" for file, line, function in found[:2])


class Tail:
    """Reads what is appended to a file, a whole line at a time.

    It begins at what is now the end. A line that grows beyond 64 KiB is handed out in parts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def lines(self, *, end: bool = False) -> Iterator[str]:
        """New lines, without their ends; with `end` also the unfinished last one."""
        while chunk := self._read():
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > _LONGEST:
                whole.append(self._rest)
                self._rest = b""
            yield from map(_text, whole)
        if end and self._rest:
            yield _text(self._rest)
            self._rest = b""

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(_CHUNK)
        except FileNotFoundError:  # the worker has not made it yet
            return b""
        self._offset += len(chunk)
        return chunk


def _text(line: bytes) -> str:
    """As a terminal would show it: a carriage return starts the line anew."""
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
