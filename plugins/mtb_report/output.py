"""``--output`` of the commands about results: known to be possible before anything is measured."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from mtb_core import ConfigError, RunFailed


def check_output(name: str) -> None:
    """Refuse a file that could not be written later; nothing is left behind but its folder.

    Raises:
        ConfigError: it is a folder, or its folder cannot be made or written to.
    """
    target = Path(os.path.realpath(name))
    if target.is_dir():
        raise ConfigError(f"--output {name} is a folder; name a file.")
    if target.exists() and not target.is_file():
        return  # a pipe or a terminal: it is written to as it is
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".tmp-"):
            pass
    except OSError as error:
        raise ConfigError(f"--output {name} cannot be written: {error.strerror}. Name another file.") from error


def write_output(name: str, document: Any) -> None:
    """Write `document` as JSON.

    Raises:
        RunFailed: it cannot be written by now.
    """
    from mtb_core import write_json  # noqa: PLC0415  (help needs none of it)

    try:
        write_json(name, document)
    except OSError as error:
        raise RunFailed(
            f"--output {name} cannot be written: {error.strerror}. What was measured is where the run left it; the "
            "command shows it anew."
        ) from error
