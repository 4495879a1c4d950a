"""Ranks that need more time by themselves than the others do, in which phase, and how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

import attrs

#: A rank is a straggler if its excess is at least this share of the step …
SHARE = 0.05
#: … and it was slower than the others in at least this share of the steps.
CONSTANCY = 0.75

#: Own time by phase, ns, by step, by rank.
OwnTimes = Mapping[int, Mapping[int, Mapping[str, int]]]


@attrs.frozen
class Straggler:
    """A rank that holds the others up.

    Attributes:
        phase: where most of the excess arises.
        excess: median over steps of its own time less the median of the other ranks', ns.
        phase_excess: the same of that phase alone.
        share: of the mean step.
        slower: in how many of `steps` it was slower than the others' median.
        compute_excess: the same of the time in computation; where it is small, the rank does not compute more but
            idles: it waits for data, for the host, or sleeps.
    """

    rank: int
    phase: str
    excess: float
    phase_excess: float
    share: float
    slower: int
    steps: int
    compute_excess: float


def find_stragglers(
    own: OwnTimes, compute: Mapping[int, Mapping[int, int]], step_length: Mapping[int, Mapping[int, int]]
) -> list[Straggler]:
    """Compare each rank with the median of the others, step by step; the worst one first.

    Args:
        own: see `OwnTimes`.
        compute: ns by step, by rank.
        step_length: ns by step, by rank.
    """
    ranks = sorted(own)
    if len(ranks) < 2:
        return []
    steps = sorted(set.intersection(*(set(own[r]) for r in ranks)))
    if not steps:
        return []
    typical = fmean(step_length[r][s] for r in ranks for s in steps)
    found = []
    for rank in ranks:
        others = [r for r in ranks if r != rank]
        excess = [_excess({r: sum(own[r][s].values()) for r in ranks}, rank, others) for s in steps]
        middle = median(excess)
        slower = sum(e > 0 for e in excess)
        if middle < SHARE * typical or slower < CONSTANCY * len(steps):
            continue
        by_phase = _phases(own, rank, others, steps)
        phase = max(by_phase, key=lambda name: by_phase[name])
        computing = median(_excess({r: compute[r][s] for r in ranks}, rank, others) for s in steps)
        found.append(Straggler(rank, phase, middle, by_phase[phase], middle / typical, slower, len(steps), computing))
    return sorted(found, key=lambda s: -s.excess)


def _excess(values: Mapping[int, int], rank: int, others: Sequence[int]) -> float:
    return values[rank] - median(values[r] for r in others)


def _phases(own: OwnTimes, rank: int, others: Sequence[int], steps: Sequence[int]) -> dict[str, float]:
    names = {name for r in (rank, *others) for s in steps for name in own[r][s]}
    return {
        name: median(_excess({r: own[r][s].get(name, 0) for r in (rank, *others)}, rank, others) for s in steps)
        for name in sorted(names)
    }
