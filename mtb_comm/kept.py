"""Finished rows in a file beside the run, so that they outlive the rank that has them. Torch-free.

It is insurance only: where the file cannot be written, the run goes on without it and says so once.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtb_core import Failure, MtbError, dumps

_EVENT = "not_kept"


class Kept:
    """Rank 0's side. `path` None: nothing is kept; `tell` hands a mapping to the launcher."""

    def __init__(self, path: Path | None, tell: Callable[[dict[str, Any]], object]) -> None:
        self._path, self._tell = path, tell

    def write(self, value: Mapping[str, Any]) -> None:
        """Add a line."""
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(dumps(value) + "\n")
        except OSError as error:
            self._path = None
            self._tell({"event": _EVENT, "text": _unkept(error)})


@contextmanager
def kept_file() -> Iterator[Path | None]:
    """A file for `Kept`, which exists once something was written; None where there can be no folder for it."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="mtb-comm-", ignore_cleanup_errors=True)
    except OSError as error:
        _warn(_unkept(error))
        yield None
        return
    with folder as name:
        yield Path(name) / "rows.jsonl"


def read_kept(path: Path | None) -> list[dict[str, Any]]:
    """Rows of a rank that did not finish; a last line that was cut is dropped."""
    lines: list[dict[str, Any]] = []
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines() if path is not None else ():
            with suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def warned(fields: Mapping[str, Any]) -> bool:
    """True if a message of a rank was a warning about kept rows; it is then on stderr."""
    if fields.get("event") != _EVENT:
        return False
    _warn(fields["text"])
    return True


def cause_of(error: BaseException) -> Failure:
    """The failure that an error of an external rank stands for."""
    known = getattr(error, "failure", None)
    if isinstance(known, Failure):
        return known
    return Failure(getattr(error, "rank", None), type(error).__name__, str(error), expected=isinstance(error, MtbError))


def first_line(text: str) -> str:
    """Without the stack of C++ calls that torch puts below its messages."""
    return text.strip().partition("\n")[0]


def _unkept(error: OSError) -> str:
    return (
        f"finished rows are no longer kept in a temporary file ({error.strerror or error}), so they would be lost if "
        "rank 0 died; the measurement goes on. Make room, or set TMPDIR to another folder."
    )


def _warn(text: str) -> None:
    print(f"mtb: warning: {text}", file=sys.stderr, flush=True)  # noqa: T201
