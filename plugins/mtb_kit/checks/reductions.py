"""Reductions of gradients among the collectives of a step."""

from __future__ import annotations

from mtb_core.measure.collectives import Collective
from mtb_kit.checking import Skip
from mtb_kit.lab import Lab, Run
from mtb_kit.stage import RankTrace

_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
#: Why nothing can be said of a strategy whose gradients are right, but summed by nothing that is known to sum.
NO_REDUCTION = (
    f"no known reduction seen ({', '.join(_REDUCTIONS)}): gradients are summed by other means, an all-gather say, and how "
    "often cannot be told from what is sent"
)


def gradient_reductions(run: Run, trace: RankTrace, step: int) -> list[Collective]:
    """The reductions of a step's gradients between ranks with different data, on one rank.

    Small ones are left out, and those of integers: the trainer's own agreement, counters, flags of an engine.
    """
    return [c for c in trace.collectives[step] if is_gradient_reduction(run, trace, c)]


def is_gradient_reduction(run: Run, trace: RankTrace, seen: Collective) -> bool:
    """True if a collective sums gradients over data ranks, judged by its kind, group, size and dtype."""
    plan = trace.plan
    assert plan is not None
    ranks = seen.ranks or tuple(range(run.episode.ranks))
    across = len({plan.layout.data_rank(rank) for rank in ranks}) > 1
    return seen.kind in _REDUCTIONS and across and seen.elements > 16 and "float" in seen.dtype


def needs_data_ranks(lab: Lab, ranks: int) -> None:
    """Skip where all ranks see the same samples.

    Raises:
        Skip: they do.
    """
    if lab.plan(ranks).layout.data_size == 1:
        raise Skip("one data rank: nothing to synchronise")
