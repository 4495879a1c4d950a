"""Errors with the exit code each of them ends ``mtb`` with.

Every message is one paragraph: what happened, the value seen, what is valid, what to do.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_RUN_FAILED = 3
EXIT_STOPPED = 4
EXIT_INTERRUPTED = 130


class MtbError(Exception):
    """Base of all errors that are meant for people; shown without a traceback."""

    exit_code = EXIT_RUN_FAILED


class ConfigError(MtbError):
    """Wrong usage or configuration, found before any rank started."""

    exit_code = EXIT_USAGE


class PluginError(ConfigError):
    """A plugin that was asked for cannot be used; the message carries its recorded reason."""


class CheckFailed(MtbError):
    """The thing that was checked does not hold (verify, check, compare with a gate)."""

    exit_code = EXIT_CHECK_FAILED


class RunFailed(MtbError):
    """The run failed after ranks started.

    `rank` and `step` name the first cause where they are known. `agreed`: every rank raises this same error at the
    same point, so the ranks can still leave together.
    """

    def __init__(self, message: str, *, rank: int | None = None, step: int | None = None, agreed: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.agreed = agreed


class NonFinite(RunFailed):
    """A loss or gradient is not finite; raised on all ranks at the same step, before the optimizer step."""


class MissingGradient(RunFailed):
    """A trainable parameter got no gradient."""
