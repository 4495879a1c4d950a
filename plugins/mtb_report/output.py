"""``--output`` of the commands about results."""

from __future__ import annotations

from typing import Any

from mtb_core import RunFailed


def write_output(name: str, document: Any) -> None:
    """Write `document` as JSON to the file `name`.

    Raises:
        RunFailed: it cannot be written by now.
    """
    from mtb_core import write_json  # noqa: PLC0415  (help needs none of it)

    try:
        write_json(name, document)
    except OSError as error:
        raise RunFailed(
            f"{name} cannot be written: {error.strerror}. What was measured is where the run left it; the "
            "command shows it anew."
        ) from error
