"""Ranks that need more time by themselves than the others do, in which phase, and how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

import attrs

from .chance import robust_spread, sign_test, t_test

#: A rank is a straggler if its excess is at least this share of the step …
SHARE = 0.05
#: … and it was slower than the others in at least this share of the steps.
CONSTANCY = 0.75
#: … and chance would show as much, on any of the ranks, with less than this probability.
SIGNIFICANCE = 0.05

#: Own time by phase, ns, by step, by rank.
OwnTimes = Mapping[int, Mapping[int, Mapping[str, int]]]


@attrs.frozen
class Straggler:
    """A rank that seems to hold the others up, and how likely it does so by chance.

    Attributes:
        phase: where most of the excess arises.
        excess: median over steps of its own time less the median of the other ranks', ns.
        phase_excess: the same of that phase alone.
        share: of the mean step.
        slower: in how many of `steps` it was slower than the others' median.
        compute_excess: the same of the time in computation; where it is small, the rank does not compute more but
            idles: it waits for data, for the host, or sleeps.
        chance: upper bound of the probability that any of so many equal ranks would seem as slow in so many steps.
    """

    rank: int
    phase: str
    excess: float
    phase_excess: float
    share: float
    slower: int
    steps: int
    compute_excess: float
    chance: float

    @property
    def certain(self) -> bool:
        """Whether chance is ruled out, so that it is a straggler."""
        return self.chance < SIGNIFICANCE


def find_stragglers(
    own: OwnTimes, compute: Mapping[int, Mapping[int, int]], step_length: Mapping[int, Mapping[int, int]]
) -> list[Straggler]:
    """Compare each rank with the median of the others, step by step; the worst one first.

    Those that chance may explain are among them: see `Straggler.certain`.

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
        in_phases = _in_phases(own, rank, others, steps)
        by_phase = {name: median(values) for name, values in in_phases.items()}
        phase = max(by_phase, key=lambda name: by_phase[name])
        likely = _chance(
            excess, [v for name, v in in_phases.items() if by_phase[name] >= SHARE * typical], len(by_phase)
        )
        computing = median(_excess({r: compute[r][s] for r in ranks}, rank, others) for s in steps)
        found.append(
            Straggler(
                rank, phase, middle, by_phase[phase], middle / typical, slower, len(steps), computing,
                min(1.0, likely * len(ranks)),
            )
        )  # fmt: skip
    return sorted(found, key=lambda s: -s.excess)


def _excess(values: Mapping[int, int], rank: int, others: Sequence[int]) -> float:
    return values[rank] - median(values[r] for r in others)


def _chance(excess: Sequence[float], in_phases: Sequence[Sequence[float]], phases: int) -> float:
    """The smaller probability of two tests, times two, since either may find it.

    The sign test needs many steps (7 of 7 between two ranks) and no distribution; it counts where the excess is larger
    than its own jitter. The t-test of the excess in a phase, for one of so many `phases`, tells a steady delay from jitter
    in few steps.
    """
    steady = median(excess) > robust_spread(excess)
    signs = sign_test(excess) if steady else 1.0
    return 2 * min(signs, phases * min((t_test(values) for values in in_phases), default=1.0))


def _in_phases(own: OwnTimes, rank: int, others: Sequence[int], steps: Sequence[int]) -> dict[str, list[float]]:
    """The excess in each phase, step by step."""
    names = {name for r in (rank, *others) for s in steps for name in own[r][s]}
    return {
        name: [_excess({r: own[r][s].get(name, 0) for r in (rank, *others)}, rank, others) for s in steps]
        for name in sorted(names)
    }
