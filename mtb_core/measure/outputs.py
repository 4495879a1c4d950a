"""Check, before anything is measured, that a file which an option names can be written at the end."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mtb_core.api.errors import ConfigError


def check_output(
    path: str | os.PathLike[str], option: str = "--output", *, inputs: Iterable[str | os.PathLike[str]] = ()
) -> None:
    """Refuse what could not be written later, by trying out its folder. Nothing is made or changed.

    Folders that are missing on the way count as made: whoever writes makes them. A path that exists and is no regular
    file (``/dev/stdout``, a named pipe) is left alone.

    Args:
        option: by which `path` was given, for the message.
        inputs: what the command reads, which `path` must not replace: files, and folders with their ``result.json``.

    Raises:
        ConfigError: `path` is a folder or a file that must not be written to, one of `inputs`, or no file can be made
            there.
    """
    try:
        _try_out(Path(path))
        for place in inputs:
            if any(_is_file(path, read) for read in (place, Path(place, "result.json"))):
                raise FileExistsError(errno.EEXIST, "this command reads it, and would replace it")
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} {os.fspath(path)} cannot be written: {reason}; name another file.") from error


def _is_file(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """True if both are the same regular file; devices may be read and written."""
    with suppress(OSError, ValueError):
        return Path(path).is_file() and Path(path).samefile(other)
    return False


def _try_out(target: Path) -> None:
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        pass
    else:
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not stat.S_ISREG(mode):
            return
    real = Path(os.path.realpath(target))
    existing = next(place for place in real.parents if place.exists())
    longest = os.pathconf(existing, "PC_NAME_MAX")
    if any(len(os.fsencode(part)) > longest for part in real.parts):  # the system tells only where the folder exists
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    with tempfile.TemporaryFile(dir=existing):
        pass
