"""Files that results go to: looked at before anything is measured, and written each on its own. Torch-free."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import click

from mtb_core import ConfigError


@attrs.frozen
class Output:
    """A file that was asked for: by which option, where, and how it is written."""

    option: str
    path: str | Path
    write: Callable[[], object]


def check_output(option: str, path: str | Path) -> None:
    """Refuse what could not be written after the measurement, by trying out its folder.

    Missing folders count as made. A file that exists and is no regular one (``/dev/stdout``, a pipe) is left alone.

    Raises:
        ConfigError: `path` is a folder, or no file can be made there.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if target.exists() and not target.is_file():
            if not os.access(target, os.W_OK):
                raise PermissionError(None, "no permission")
            return
        folder = Path(os.path.realpath(target)).parent
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--{option} is '{path}', which cannot be written ({reason}); give a file in a folder that may be "
            "written to."
        ) from error


def write_all(outputs: Sequence[Output]) -> bool:
    """Write each, whatever becomes of the others; False if one could not be, which is then on stderr."""
    fine = True
    for output in outputs:
        try:
            output.write()
        except OSError as error:
            fine = False
            click.echo(
                f"mtb: error: --{output.option} {output.path} could not be written: {error.strerror or error}. "
                "What else was asked for is there; make room, or give another file next time.",
                err=True,
            )
    return fine
