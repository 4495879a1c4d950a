"""The sync context: how often gradients are summed over ranks, and that it is left as it was found."""

from __future__ import annotations

from typing import Any

from mtb_core.measure.collectives import Collective
from mtb_core.testing.checking import Skip, check
from mtb_core.testing.checks.parity import GRADIENT_TOLERANCE, PLAIN_SGD, gradients, sgd
from mtb_core.testing.episodes import episode
from mtb_core.testing.lab import Lab, Run
from mtb_core.testing.probes import RaiseInSyncContext
from mtb_core.testing.stage import MicroTrace, RankTrace
from mtb_core.testing.states import Mismatch, equal_within

_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
MICRO_BATCHES = 4


def gradient_reductions(run: Run, trace: RankTrace, step: int) -> list[Collective]:
    """The reductions of a step's gradients between ranks with different data, on one rank.

    Small ones are left out: the trainer's own agreement, counters, flags of an engine.
    """
    return [c for c in trace.collectives[step] if is_gradient_reduction(run, trace, c)]


def is_gradient_reduction(run: Run, trace: RankTrace, seen: Collective) -> bool:
    """Whether a collective sums gradients over data ranks, judged by its kind, group and size."""
    plan = trace.plan
    assert plan is not None
    ranks = seen.ranks or tuple(range(run.episode.ranks))
    across = len({plan.layout.data_rank(rank) for rank in ranks}) > 1
    return seen.kind in _REDUCTIONS and across and seen.elements > 16


def synchronised(run: Run, trace: RankTrace, step: int) -> list[int]:
    """Indices of the micro-batches of a step that summed gradients over ranks; what came after the last counts there."""
    micros = [m for m in trace.micros if m.step == step]
    found = [m.index for m in micros if any(is_gradient_reduction(run, trace, c) for c in m.collectives)]
    inside = sum(len(m.collectives) for m in micros)
    later = trace.collectives[step][inside:] if _starts_with(trace, micros, step) else ()
    last = len(micros) - 1
    if last not in found and any(is_gradient_reduction(run, trace, c) for c in later):
        found.append(last)
    return found


def _starts_with(trace: RankTrace, micros: list[MicroTrace], step: int) -> bool:
    inside = [c for m in micros for c in m.collectives]
    return list(trace.collectives[step][: len(inside)]) == inside


def _needs_data_ranks(lab: Lab, ranks: int) -> None:
    if lab.plan(ranks).layout.data_size == 1:
        raise Skip("one data rank: nothing to synchronise")


@check(
    "sync.count",
    "Gradients are summed over ranks as often as the mode says: every micro-batch, or only the last.",
    mistake="the context must span forward AND backward: wrappers read the flag in one and act on it in the other; and "
    "micro.sync must be what decides",
    ranks="several",
    needs=("accumulation",),
)
def count(lab: Lab, ranks: int) -> dict[str, Any]:
    """Counted on real collectives, for each mode that is declared."""
    _needs_data_ranks(lab, ranks)
    figures = {}
    for mode in lab.capabilities.sync_modes:
        run = lab.done(sgd(ranks, grad_accum_steps=_micro_batches(lab, ranks), gradient_sync_mode=mode, steps=2))
        expected = list(range(_micro_batches(lab, ranks))) if mode == "every" else [_micro_batches(lab, ranks) - 1]
        for trace in run.traces.values():
            found = synchronised(run, trace, 2)
            if found != expected:
                raise Mismatch(
                    f"mode '{mode}': gradients summed in micro-batches {expected} of {_micro_batches(lab, ranks)}",
                    f"rank {trace.rank} summed them in {found}",
                )
        figures[f"synchronisations_{mode}"] = len(expected)
    return figures


def _micro_batches(lab: Lab, ranks: int) -> int:
    return MICRO_BATCHES if 24 % (MICRO_BATCHES * lab.plan(ranks).layout.data_size) == 0 else 2


@check(
    "sync.gradients",
    "Every sync mode ends a step with the same, right gradients.",
    mistake="what earlier micro-batches have left in the gradients must be part of what is summed, once",
    ranks="several",
    needs=("exact", "accumulation"),
)
def modes_agree(lab: Lab, ranks: int) -> None:
    """Each mode against `single`."""
    reference = lab.done(sgd(1, subject=False))
    for mode in lab.capabilities.sync_modes:
        run = lab.done(sgd(ranks, grad_accum_steps=_micro_batches(lab, ranks), gradient_sync_mode=mode, steps=2))
        for step in (1, 2):
            equal_within(
                gradients(run, step),
                gradients(reference, step),
                GRADIENT_TOLERANCE * (1 if step == 1 else 10),
                f"gradients of step {step} in mode '{mode}'",
            )


@check(
    "sync.restored",
    "Leaving the context by an exception restores the synchronising state.",
    mistake="a `yield` without try/finally: what the context switches off must be switched on again whatever happens",
    ranks="several",
    needs=("exact", "accumulation"),
)
def restored(lab: Lab, ranks: int) -> None:
    """An exception inside an unsynchronised context; the step that follows must still be right."""
    _needs_data_ranks(lab, ranks)
    if "last" not in lab.capabilities.sync_modes:
        raise Skip("every micro-batch is synchronised")
    settings = {**PLAIN_SGD, "gradient_sync_mode": "last", "grad_accum_steps": 1}
    run = lab.done(episode(ranks, states=(0, 1, 2), probes=(RaiseInSyncContext(step=1),), **settings))
    reference = lab.done(sgd(1, subject=False))
    equal_within(
        gradients(run, 1), gradients(reference, 1), GRADIENT_TOLERANCE, "gradients of the step after the exception"
    )
