"""The sync context: how often gradients are summed over ranks, and that it is left as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mtb_kit.checking import Skip, check
from mtb_kit.checks.parity import GRADIENT_TOLERANCE, MICRO_BATCHES, PLAIN_SGD, gradients, in_mode, sgd
from mtb_kit.checks.reductions import NO_REDUCTION, gradient_reductions, is_gradient_reduction, needs_data_ranks
from mtb_kit.episodes import episode
from mtb_kit.lab import Lab, Run
from mtb_kit.probes import RaiseInSyncContext
from mtb_kit.stage import MicroTrace, RankTrace
from mtb_kit.states import Mismatch, equal_within

#: Why a strategy whose schedule is its own cannot be judged by micro-batches.
NO_CONTEXT = "its accumulate does not go through mtb_micro_batch: there is no sync context to look at"


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


def sums_by_other_means(run: Run, step: int) -> bool:
    """True if data ranks exchange numbers in a step, but by no known reduction, on any rank."""
    plan = run.first.plan
    assert plan is not None
    exchanged = False
    for trace in run.traces.values():
        for seen in trace.collectives[step]:
            if is_gradient_reduction(run, trace, seen):
                return False
            ranks = seen.ranks or tuple(run.traces)
            across = len({plan.layout.data_rank(rank) for rank in ranks}) > 1
            exchanged = exchanged or (across and seen.elements > 16)
    return exchanged


def _judged_by_reductions(lab: Lab, ranks: int, run: Run) -> None:
    """Skip where `run` goes through no sync context, or sums gradients in a way that is not known.

    That they are right is seen to first.
    """
    if not any(trace.micros for trace in run.traces.values()):
        raise Skip(NO_CONTEXT)
    if sums_by_other_means(run, 2):
        if lab.promises("exact", ranks):
            expected = gradients(lab.done(sgd(1, subject=False)), 1)
            equal_within(gradients(run, 1), expected, GRADIENT_TOLERANCE, "gradients without any known reduction")
        raise Skip(NO_REDUCTION)


def _starts_with(trace: RankTrace, micros: list[MicroTrace], step: int) -> bool:
    inside = [c for m in micros for c in m.collectives]
    return list(trace.collectives[step][: len(inside)]) == inside


@check(
    "sync.count",
    "Gradients are summed over ranks as often as the mode says: every micro-batch, or only the last.",
    mistake="the context must span forward AND backward: wrappers read the flag in one and act on it in the other; and "
    "micro.sync must be what decides",
    ranks="several",
    needs=("accumulation", "sums_gradients"),
)
def count(lab: Lab, ranks: int) -> dict[str, Any]:
    """Counted on real collectives, for each mode that is declared."""
    needs_data_ranks(lab, ranks)
    figures = {}
    micro_batches = lab.micro_batches(ranks, MICRO_BATCHES)
    for mode in lab.sync_modes(ranks):
        run = in_mode(lab, ranks, mode)
        _judged_by_reductions(lab, ranks, run)
        expected = list(range(micro_batches)) if mode == "every" else [micro_batches - 1]
        for trace in run.traces.values():
            found = synchronised(run, trace, 2)
            if found != expected:
                raise Mismatch(
                    f"mode '{mode}': gradients summed in micro-batches {expected} of {micro_batches}",
                    f"rank {trace.rank} summed them in {found}",
                )
        figures[f"synchronisations_{mode}"] = len(expected)
    return figures


@check(
    "sync.volume",
    "Where gradients are summed over ranks, each element is summed once.",
    mistake="gradients are reduced by the wrapper and by the strategy as well; a second average changes no number, but "
    "doubles the traffic. Or a part of the gradients is not reduced at all",
    ranks="several",
    needs=("accumulation", "sums_gradients"),
)
def volume(lab: Lab, ranks: int) -> dict[str, Any]:
    """Elements of all reductions of a synchronisation, against those of the trainable parameters of its ranks.

    Between once and less than twice: besides padding, hybrid sharding sums its shards once more over the copies. A
    strategy that is not exact may send less, by compression. Elements that one rank alone holds (experts, say) need
    no sum.
    """
    needs_data_ranks(lab, ranks)
    figures = {}
    for mode in lab.sync_modes(ranks):
        run = in_mode(lab, ranks, mode)
        _judged_by_reductions(lab, ranks, run)
        for rank, trace in run.traces.items():
            trained, shared = _trained(run, trace)
            least = _ROUNDING_OFF * shared / trained if lab.promises("exact", ranks) else 0.0
            times = _reduced(run, trace, 2) / (len(synchronised(run, trace, 2)) or 1) / trained
            figures[f"times_summed_{mode}"] = times
            if not least <= times < 2.0:
                raise Mismatch(
                    f"mode '{mode}': each of {trained} elements summed once in a synchronisation (up to less "
                    "than twice, with padding and a second level)",
                    f"{times:.3g} times on rank {rank}",
                )
    return figures


#: Reductions of a few elements, which cannot be told from the trainer's own, are missing from the sum.
_ROUNDING_OFF = 0.9


def _reduced(run: Run, trace: RankTrace, step: int) -> int:
    return sum(c.elements for c in gradient_reductions(run, trace, step))


def _trained(run: Run, trace: RankTrace) -> tuple[int, int]:
    """Elements of the model on this rank and those that differ from it in their data only; those that must be summed.

    The latter are the elements of this rank that others of these ranks hold as well.
    """
    assert trace.plan is not None
    layout = trace.plan.layout

    def place(rank: int) -> dict[str, int]:
        return {
            axis: index
            for axis, index in layout.coordinates(rank).items()
            if layout.role(axis) not in ("data", "tokens")
        }

    copies: dict[str, torch.Tensor] = {}
    for rank, other in run.traces.items():
        if place(rank) == place(trace.rank):
            for key, shape, where in _held(other):
                copies.setdefault(key, torch.zeros(shape, dtype=torch.int64))[where] += 1
    shared = sum(int((copies[key][where] > 1).sum()) for key, _, where in _held(trace))
    return sum(int((count > 0).sum()) for count in copies.values()), shared


def _held(trace: RankTrace) -> Iterator[tuple[str, tuple[int, ...], tuple[slice, ...]]]:
    """Key, shape of the whole, and place of each part of the model on a rank."""
    for key, parts in trace.states[0].items():
        for tensor, shape, offset in parts if key.startswith("model/") else ():
            yield key, shape, tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))


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
    for mode in lab.sync_modes(ranks):
        run = in_mode(lab, ranks, mode)
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
    needs_data_ranks(lab, ranks)
    if "last" not in lab.sync_modes(ranks):
        raise Skip("every micro-batch is synchronised")
    settings = {**PLAIN_SGD, "gradient_sync_mode": "last", "grad_accum_steps": 1}
    run = lab.done(episode(ranks, states=(0, 1, 2), probes=(RaiseInSyncContext(step=1),), **settings))
    if not any("raised" in trace.notes for trace in run.traces.values()):
        raise Skip(NO_CONTEXT)
    reference = lab.done(sgd(1, subject=False))
    equal_within(
        gradients(run, 1), gradients(reference, 1), GRADIENT_TOLERANCE, "gradients of the step after the exception"
    )
