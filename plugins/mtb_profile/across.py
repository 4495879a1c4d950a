"""Collectives across ranks: which belong together, who came last, and what was waiting and what was transfer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import attrs

from . import kinds
from .loading import Collective, shifted
from .phases import Phases
from .windows import View, look

#: Where more than this share of the synchronising collectives did not overlap in time, the clocks must differ.
_IMPOSSIBLE_SHARE = 0.2
#: Differences of arrival below this are noise of the clocks' reading, ns.
LATE_NS = 20_000


@attrs.frozen
class Matched:
    """One collective as all its ranks saw it.

    Attributes:
        step: the step's number; None where the trace has no steps.
        members: by rank.
    """

    operation: str
    group: str
    step: int | None
    members: dict[int, Collective]

    @property
    def arrived(self) -> int:
        """When the last rank came, ns."""
        return max(c.start for c in self.members.values())

    @property
    def last(self) -> int:
        """The rank that came last."""
        return max(self.members, key=lambda r: (self.members[r].start, -r))

    @property
    def lateness(self) -> int:
        """How long after the median of the others the last rank came, ns."""
        others = [c.start for r, c in self.members.items() if r != self.last]
        return self.arrived - int(median(others))

    def waiting(self, rank: int) -> int:
        """Of the rank's time in it, how much it waited for the others to come, ns."""
        own = self.members[rank]
        return max(0, min(self.arrived, own.end) - own.start)

    def transfer(self, rank: int) -> int:
        """The rest: from when all were there, ns."""
        own = self.members[rank]
        return own.end - own.start - self.waiting(rank)


@attrs.frozen
class Matching:
    """All that was matched.

    Attributes:
        unmatched: collectives without a partner, by reason.
    """

    matched: list[Matched]
    unmatched: dict[str, int]


def match(views: Sequence[View]) -> Matching:
    """Bring together the collectives of several ranks: the k-th of its kind and size in its group and step is one.

    Ranks of a group issue its collectives in the same order, or they would hang. A number of them that differs between
    ranks (a trace that is cut off, say) makes those of that kind in that step unmatched, and so does a group that the
    trace does not tell, or one with fewer ranks than were found: none is guessed.
    """
    queues: dict[tuple[Any, ...], dict[int, list[Collective]]] = {}
    p2p = unknown = 0
    for view in views:
        for collective in sorted(view.trace.collectives, key=lambda c: c.start):
            if not view.has(collective.start, collective.launch):
                continue
            if collective.operation in kinds.POINT_TO_POINT:
                p2p += 1
                continue
            if not collective.group_known:
                unknown += 1
                continue
            step = view.step_of(collective.start, collective.launch)
            key = (collective.group, step, collective.operation, _size(collective))
            queues.setdefault(key, {}).setdefault(view.trace.rank, []).append(collective)
    matched: list[Matched] = []
    lonely = uneven = many = 0
    for (group, step, operation, _), by_rank in queues.items():
        if len(by_rank) < 2:
            lonely += sum(len(q) for q in by_rank.values())
        elif len(by_rank) > _group_size(by_rank):
            many += sum(len(q) for q in by_rank.values())
        elif len({len(q) for q in by_rank.values()}) > 1:
            uneven += sum(len(q) for q in by_rank.values())
        else:
            ranks = sorted(by_rank)
            rows = zip(*(by_rank[r] for r in ranks), strict=True)
            matched += [Matched(operation, group, step, dict(zip(ranks, row, strict=True))) for row in rows]
    reasons = {
        "point-to-point, whose other side the trace does not name": p2p,
        "group not known": unknown,
        "seen on one rank only": lonely,
        "on more ranks than the group has": many,
        "another number of them on other ranks": uneven,
    }
    return Matching(
        sorted(matched, key=lambda m: m.arrived), {reason: count for reason, count in reasons.items() if count}
    )


def _group_size(by_rank: Mapping[int, Sequence[Collective]]) -> float:
    """The smallest size of the group that any of the collectives names; without one there is no limit."""
    return min(
        (c.group_size for queue in by_rank.values() for c in queue if c.group_size is not None), default=math.inf
    )


def _size(collective: Collective) -> int | None:
    """Sizes tell collectives apart where all ranks see the same one."""
    uneven = {"all_to_all", "gather", "scatter", "other"}
    return None if collective.operation in uneven else collective.message_bytes


def align_clocks(views: Sequence[View]) -> tuple[list[View], dict[int, int]]:
    """Views with comparable clocks, and by how much each rank's was moved, ns; nothing is moved without need.

    A rank cannot leave a synchronising collective before another one has come. Where that seems to have happened often,
    the clocks differ, and each rank's is moved so that in the median its collectives end with the first rank's.
    """
    found = [m for m in match(views).matched if m.operation in kinds.SYNCHRONISING]
    base = min((v.trace.rank for v in views), default=0)
    shifts: dict[int, int] = {}
    for view in views:
        rank = view.trace.rank
        pairs = [(m.members[base], m.members[rank]) for m in found if base in m.members and rank in m.members]
        impossible = sum(a.end < b.start or b.end < a.start for a, b in pairs)
        if rank != base and pairs and impossible > _IMPOSSIBLE_SHARE * len(pairs):
            shifts[rank] = int(median(a.end - b.end for a, b in pairs))
    if not shifts:
        return list(views), {}
    moved = [look(shifted(v.trace, shifts[v.trace.rank]), v.window) if v.trace.rank in shifts else v for v in views]
    return moved, shifts


@attrs.frozen
class Arrivals:
    """How a rank comes to the collectives that it shares with others.

    Attributes:
        collectives: how many were matched.
        last: how often it was the last to come, by more than noise.
        lateness: mean of how late it then was, ns.
        phases: how often it was last, by the phase in which it came.
        waiting, transfer: its time in those collectives, ns.
    """

    rank: int
    collectives: int
    last: int
    lateness: float
    phases: dict[str, int]
    waiting: int
    transfer: int


def arrivals(views: Sequence[View], matching: Matching, phases: dict[int, Phases]) -> list[Arrivals]:
    """One row a rank."""
    out = []
    for view in views:
        rank = view.trace.rank
        mine = [m for m in matching.matched if rank in m.members]
        late = [m for m in mine if m.last == rank and m.lateness > LATE_NS]
        where: dict[str, int] = {}
        for m in late:
            own = m.members[rank]
            name = phases[rank].at(own.launch if own.launch >= 0 else own.start)
            where[name] = where.get(name, 0) + 1
        out.append(
            Arrivals(
                rank,
                len(mine),
                len(late),
                sum(m.lateness for m in late) / len(late) if late else 0.0,
                where,
                sum(m.waiting(rank) for m in mine),
                sum(m.transfer(rank) for m in mine),
            )
        )
    return out
