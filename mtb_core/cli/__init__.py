"""The command ``mtb``: a thin, lazy shell over the Python API. `main` maps what happens to exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from types import FrameType

import click

from mtb_core.api.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RUN_FAILED,
    EXIT_STOPPED,
    EXIT_USAGE,
    MtbError,
)

#: The environment variable by which a shell asks; its value says what for (``bash_source``, ``zsh_complete``, …).
COMPLETION = "_MTB_COMPLETE"
EXIT_BROKEN_PIPE = 141  # as a shell reports a reader that went away


class _Stopped(KeyboardInterrupt):
    """SIGTERM or SIGUSR1 came where nobody else listens: before ranks are started, say, while torch is imported.

    Who catches whatever plugins and models raise lets Ctrl-C pass, and so this.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mtb`` with the arguments `argv` (None: the process's own) and return its exit code.

    Errors meant for people are one paragraph on stderr. Everything else is a defect, of ours or of a plugin, and
    shown with its traceback.
    """
    from .root import root  # noqa: PLC0415  (an error in there is reported like any other)

    _fill_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if COMPLETION in os.environ:
        return _complete(root, os.environ[COMPLETION])
    try:
        with _ending_at_signals(last=argv is None):
            code = _invoke(root, arguments)
        sys.stdout.flush()
        return code
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:  # nothing was said that could be wrong
        _complain(error.format_message())
        return EXIT_USAGE
    except click.ClickException as error:
        return _refuse(_usage_text(error), EXIT_USAGE, arguments)
    except MtbError as error:
        return _refuse(str(error), error.exit_code, arguments)
    except _Stopped as stopped:
        return _refuse_stopped(str(stopped), arguments)
    except (KeyboardInterrupt, click.Abort):
        return _refuse("interrupted.", EXIT_INTERRUPTED, arguments)
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if not (_drop_stdout() or _from_writing(error)):
            return _defect()
        return _refuse(f"cannot write the output: {error.strerror or error}.", EXIT_RUN_FAILED, arguments)
    except Exception:  # noqa: BLE001  (the last one to see it)
        return _defect()


def _complete(root: click.Command, instruction: str) -> int:
    """Answer a shell that completes a command line, or asks for the script that makes it do so.

    Warnings would be printed into the line that is being typed, so nothing is written to stderr.
    """
    from click.shell_completion import shell_complete  # noqa: PLC0415  (only shells need it)

    with redirect_stderr(StringIO()):
        return shell_complete(root, {}, "mtb", COMPLETION, instruction)


@contextmanager
def _ending_at_signals(*, last: bool) -> Iterator[None]:
    """While open, stop signals end the command with the contract's exit code; what trains notes them instead.

    Only the first does: what is tidied up because of it is not disturbed by another. Where this command is the `last`
    thing that the process does they are ignored from then on, for the exit code is settled: batch systems signal a
    process, and its group as well, and the interpreter takes a while to end.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in former:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(signal.Signals(number).name)

    here = threading.current_thread() is threading.main_thread()
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1) if here}
    for number in former:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_IGN if last else signal.SIG_DFL if handler is None else handler)


def _refuse_stopped(name: str, arguments: list[str]) -> int:
    from mtb_core.launch.worker import external_launcher  # noqa: PLC0415  (most commands do without)

    code = _refuse(f"stopped by {name}.", EXIT_STOPPED, arguments)
    return code if external_launcher() is None else EXIT_OK  # torchrun takes any other code for a failure


def _fill_closed_streams() -> None:
    """Replace a standard stream that the caller closed (``>&-``) by one that leads nowhere.

    Otherwise every use would have to ask whether the stream is there, and a file that is opened later would get its
    descriptor, and with it what C code prints.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open("w" if descriptor else "r", encoding="utf-8")  # noqa: SIM115  (for the process's life)
            if stream.fileno() == descriptor:
                os.set_inheritable(descriptor, True)
            setattr(sys, name, stream)


def _from_writing(error: OSError) -> bool:
    """True if a write to a standard stream failed; one without a buffer has nothing left to try again."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    module = innermost.f_globals.get("__name__", "")
    return error.filename is None and (module == "click.utils" or module.startswith((f"{__name__}.", "rich.")))


def _defect() -> int:
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
    _complain(f"{shown}mtb: {'' if code in (EXIT_INTERRUPTED, EXIT_STOPPED) else 'error: '}{text}")
    return code


def _complain(text: str) -> None:
    try:
        click.echo(text, err=True)
    except OSError:  # stderr is closed; the exit code has to do
        _drop_stdout()


def _drop_stdout() -> bool:
    """Keep the interpreter from complaining at exit about output that cannot be written; whether there was any."""
    dropped = False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
            dropped = True
    os.close(nowhere)
    return dropped
