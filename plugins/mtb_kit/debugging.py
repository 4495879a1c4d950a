"""A debugger in one rank of an episode, on the terminal that the kit was started from."""

from __future__ import annotations

import contextlib
import os
import pdb  # noqa: T100  (a debugger is what is asked for)
import sys
from collections.abc import Generator, Iterator
from typing import Any

import attrs

from mtb_core.api.errors import ConfigError
from mtb_core.api.hooks import hookimpl
from mtb_core.api.values import Job


@attrs.frozen
class Terminal:
    """Terminal and rank of a debugger. Ranks have no standard input of their own, so it is opened by its path."""

    rank: int
    path: str

    @classmethod
    def here(cls, rank: int) -> Terminal:
        """This process's terminal, for `rank`.

        Raises:
            ConfigError: standard input is no terminal.
        """
        try:
            return cls(rank, os.ttyname(sys.stdin.fileno()))
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"--debug-rank {rank} needs a terminal to debug on, but standard input is none; start mtb from a shell."
            ) from error

    def debugger(self) -> pdb.Pdb:
        """A debugger that talks to the terminal."""
        return pdb.Pdb(stdin=open(self.path, encoding="utf-8"), stdout=open(self.path, "w", encoding="utf-8"))  # noqa: PTH123  (open as long as the debugger)

    @contextlib.contextmanager
    def post_mortem(self) -> Iterator[None]:
        """Stop where an exception was raised, then let it go on."""
        try:
            yield
        except Exception as error:
            debugger = self.debugger()
            debugger.message(f"rank {self.rank}: {type(error).__name__}: {error}")
            debugger.reset()
            debugger.interaction(None, error.__traceback__)
            raise


class Debugger:
    """The run plugin that stops its rank at the strategy's ``prepare``; from there on one can step and set breaks."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Any, Any]:
        """Stop before the strategy is called."""
        debugger = self._terminal.debugger()
        debugger.message(f"rank {job.ctx.rank} of {job.ctx.world_size}: about to call the strategy's prepare(job)")
        debugger.set_trace(sys._getframe())  # noqa: SLF001  (as pdb.set_trace does)
        return (yield)
