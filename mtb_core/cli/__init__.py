"""The command ``mtb``: a thin, lazy shell over the Python API. `main` maps what happens to exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from mtb_core.api.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RUN_FAILED,
    EXIT_USAGE,
    MtbError,
)

EXIT_BROKEN_PIPE = 141  # as a shell reports a reader that went away


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mtb`` with the arguments `argv` (None: the process's own) and return its exit code.

    Errors meant for people are one paragraph on stderr. Everything else is a defect, of ours or of a plugin, and
    shown with its traceback.
    """
    from .root import root  # noqa: PLC0415  (an error in there is reported like any other)

    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _invoke(root, arguments)
        sys.stdout.flush()
        return code
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        return _refuse(_usage_text(error), EXIT_USAGE, arguments)
    except MtbError as error:
        return _refuse(str(error), error.exit_code, arguments)
    except (KeyboardInterrupt, click.Abort):
        return _refuse("interrupted.", EXIT_INTERRUPTED, arguments)
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_BROKEN_PIPE
    except Exception:  # noqa: BLE001  (the last one to see it)
        _complain(traceback.format_exc() + "mtb: this is a defect, not your mistake; please report it with the above.")
        return EXIT_RUN_FAILED


def _invoke(root: click.Command, arguments: list[str]) -> int:
    """Without click's own handling of errors, whose exit codes are not the contract's."""
    try:
        with root.make_context("mtb", [*arguments]) as context:
            value = root.invoke(context)
    except click.exceptions.Exit as error:
        value = error.exit_code
    return value if isinstance(value, int) else EXIT_OK


def _usage_text(error: click.ClickException) -> str:
    text = error.format_message()
    context = getattr(error, "ctx", None)
    return f"{text} See `{context.command_path} --help`." if context is not None else text


def _refuse(text: str, code: int, arguments: list[str]) -> int:
    shown = traceback.format_exc() if "--debug" in arguments else ""
    _complain(f"{shown}mtb: {'' if code == EXIT_INTERRUPTED else 'error: '}{text}")
    return code


def _complain(text: str) -> None:
    try:
        click.echo(text, err=True)
    except OSError:  # stderr is closed; the exit code has to do
        _drop_stdout()


def _drop_stdout() -> None:
    """Keep the interpreter from complaining at exit about output that nobody reads any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
