"""Writing a report again whenever the results it is made of change."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

#: How often folders are looked at, in seconds.
INTERVAL_S = 2.0

_Seen = dict[str, tuple[int, int]]


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the whole new one; folders on the way are made.

    A path that exists and is no regular file (``/dev/stdout``, a named pipe) is written to directly.

    Raises:
        OSError: it cannot be written; an earlier file is left as it was.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".tmp-{secrets.token_hex(8)}"
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def snapshot(paths: list[Path], without: Path | None = None) -> _Seen:
    """Size and time of change of every result and metrics file below `paths`; `without` is the report itself."""
    out: _Seen = {}
    for path in paths:
        for file in _files(path):
            if without is not None and file.resolve() == without.resolve():
                continue
            try:
                found = file.stat()
            except FileNotFoundError:  # replaced between the two looks
                continue
            out[str(file)] = (found.st_size, found.st_mtime_ns)
    return out


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, _, names in os.walk(path):
        for name in names:
            if name.endswith((".json", ".jsonl")) and not name.startswith(".tmp-"):
                yield Path(folder) / name


def watch(
    paths: list[Path],
    write: Callable[[], None],
    *,
    without: Path | None = None,
    wait: Callable[[], None] = lambda: time.sleep(INTERVAL_S),
) -> None:
    """Call `write` now, and again after each `wait` that finds a change below `paths`. Ends by KeyboardInterrupt.

    Modification times are compared for being different, not for being later: a clock set back changes nothing.
    """
    seen = snapshot(paths, without)
    write()
    while True:
        wait()
        now = snapshot(paths, without)
        if now != seen:
            seen = now
            write()
