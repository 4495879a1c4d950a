"""Ranks that stay: the same processes run one episode after the other, each in process groups of its own.

Starting processes, and what torch does once in each of them, takes longer than an episode.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs

from mtb_core.launch import LaunchSpec
from mtb_core.ranks.failures import Failure
from mtb_core.ranks.worker import Worker
from mtb_launcher import die_with, launch, pick_method

from .episodes import Episode
from .rank import RankWork, rank_of_episode

#: Ranks that are told to leave may take so long; then they are killed.
_LEAVE_S = 5.0
#: Makes what a rank needs of an episode and its folder; called on each rank.
MakeWork = Callable[[Episode, Path], RankWork]


@attrs.frozen
class Ending:
    """End of the ranks.

    Attributes:
        log: the last lines that each rank has written, by rank.
        signal: name of the stop signal that their launcher got, if any.
    """

    exit_reason: str
    failure: Failure | None
    log: dict[int, list[str]]
    signal: str | None = None


class StandingRanks:
    """`ranks` processes that wait for episodes. An episode that fails on any of them ends them all.

    They are forked, with a launcher of their own between them and this process, and end when it does.
    """

    def __init__(self, ranks: int, make: MakeWork, log_dir: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._orders, theirs = zip(*(context.Pipe() for _ in range(ranks)), strict=True)
        self._ended, child_ended = context.Pipe(duplex=False)
        self._process = context.Process(target=_launch, args=(os.getpid(), make, theirs, child_ended, log_dir))
        self._process.start()
        for connection in (*theirs, child_ended):
            connection.close()
        self._idle = True

    @staticmethod
    def possible(ranks: int) -> bool:
        """True if so many ranks can be forked here."""
        return pick_method("auto", ranks, 1) == "fork"

    def play(self, asked: Episode, folder: Path) -> Ending | None:
        """Run an episode. None: all ranks came to its end, and wait for the next one; otherwise they are gone."""
        self._idle = False
        for connection in self._orders:
            connection.send((asked, folder))
        busy = set(self._orders)
        while busy:
            ready = set(wait([*busy, self._ended, self._process.sentinel]))
            if ready & {self._ended, self._process.sentinel}:
                return self._ending()
            for connection in busy & ready:
                connection.recv()
            busy -= ready
        self._idle = True
        return None

    def _ending(self) -> Ending:
        try:
            ending: Ending = self._ended.recv()
        except EOFError:
            ending = Ending("failed", Failure(None, "LauncherDied", "The launcher of the ranks has died."), {})
        self.close()
        return ending

    def close(self) -> None:
        """End the ranks; at once, where an episode was broken off."""
        if self._idle:
            for connection in self._orders:
                connection.send(None)
            self._process.join(_LEAVE_S)
        self._process.kill()
        self._process.join()
        for connection in (*self._orders, self._ended):
            connection.close()


def _launch(laboratory: int, make: MakeWork, orders: Sequence[Connection], ended: Connection, log_dir: Path) -> None:
    """Body of the launcher."""
    die_with(laboratory)
    os.setsid()  # Ctrl-C at the terminal is the laboratory's
    log: dict[int, list[str]] = {}

    def keep(rank: int, line: str) -> None:
        log.setdefault(rank, []).append(line)

    outcome = launch(
        LaunchSpec(
            entry=_stand,
            payload=(make, orders),
            nproc=len(orders),
            start_method="fork",
            log_dir=log_dir,
            on_line=keep,
        )
    )
    ended.send(Ending(outcome.exit_reason, outcome.failure, log, outcome.signal))


def _stand(payload: Any, worker: Worker) -> None:
    """Body of a rank: run what it is told to."""
    make, orders = payload
    mine = orders[worker.rank]
    for number in itertools.count():
        told = mine.recv()
        if told is None:
            return
        asked, folder = told
        rank_of_episode(make(asked, folder), attrs.evolve(worker, attempt=f"{worker.attempt}/{number}"))
        mine.send(None)
