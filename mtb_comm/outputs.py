"""Files that results go to, written each on its own. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import click


@attrs.frozen
class Output:
    """A file that was asked for: by which option, where, and how it is written."""

    option: str
    path: str | Path
    write: Callable[[], object]


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
