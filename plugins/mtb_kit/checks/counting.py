"""Checks of the group ``parity`` about who sees and counts what: samples, positions, tokens, and what is reported of them."""

from __future__ import annotations

import hashlib
import math

import torch

from mtb_kit.checking import check
from mtb_kit.checks.parity import TOLERANCE, sgd, training
from mtb_kit.episodes import Episode, episode
from mtb_kit.lab import Lab, Run
from mtb_kit.probes import Inputs
from mtb_kit.stage import RankTrace
from mtb_kit.states import Mismatch, Whole

#: Too small for any weight to change, so that what is reported must be right for strategies that are not exact too.
_STILL = 1e-30
#: Norms of gradients that are summed in less than fp32.
_LOW_PRECISION = 2e-2


def seen(ranks: int, *, subject: bool = True) -> Episode:
    """Two steps whose inputs are kept."""
    return episode(ranks, subject=subject, steps=2, probes=(Inputs(),))


@check(
    "parity.data",
    "Ranks together see each sample of the global batch exactly once.",
    mistake="an axis of the layout has the wrong role: ranks along 'data' axes see other samples, those along all others "
    "the same",
)
def data(lab: Lab, ranks: int) -> None:
    """The inputs that each rank gets, put together along axes of the role 'tokens', against those of `single`."""
    found = _samples(lab.done(seen(ranks)))
    expected = _samples(lab.done(seen(1, subject=False)))
    if found != expected:
        raise Mismatch(
            f"the {len(expected)} samples that `single` sees, each once",
            f"{len(found)} samples, {len(set(found) & set(expected))} of them right",
        )


def _samples(run: Run) -> list[tuple[int, str]]:
    """(step, digest) of every sample, sorted."""
    rows = []
    for stream in _streams(run).values():
        for step, inputs in _joined(stream).items():
            rows += [(step, hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16]) for row in inputs]
    return sorted(rows)


def _streams(run: Run) -> dict[int, list[RankTrace]]:
    """The ranks that share samples, by sample stream."""
    found: dict[int, list[RankTrace]] = {}
    for trace in run.traces.values():
        found.setdefault(trace.data_rank, []).append(trace)
    return found


def _joined(stream: list[RankTrace]) -> dict[int, torch.Tensor]:
    """The samples of a stream by step, of the positions of all its ranks; -1 where no rank has the position.

    Raises:
        Mismatch: ranks have other tokens at the same position.
    """
    out: dict[int, torch.Tensor] = {}
    for trace in stream:
        for step, inputs in trace.notes["inputs"].items():
            where = _positions(trace, inputs.shape[1])
            length = max([*where, inputs.shape[1] - 1]) + 1
            whole = out.setdefault(step, torch.full((len(inputs), length), -1, dtype=inputs.dtype))
            if whole.shape[1] < length:
                whole = torch.cat([whole, whole.new_full((len(whole), length - whole.shape[1]), -1)], 1)
                out[step] = whole
            known = whole[:, where]
            if ((known >= 0) & (known != inputs)).any():
                raise Mismatch("ranks of one sample stream to see the same samples", f"rank {trace.rank} sees others")
            whole[:, where] = inputs
    return out


def _positions(trace: RankTrace, length: int) -> list[int]:
    found: list[int] | None = trace.notes["positions"]
    return list(range(length)) if found is None else found


@check(
    "parity.positions",
    "Ranks along axes of the role 'tokens' share out the positions of a sample, each exactly once.",
    mistake="Prepared.positions leaves positions out, or gives some to two ranks: their tokens are counted twice; or "
    "ranks have their own positions along an axis whose role is not 'tokens'",
)
def positions(lab: Lab, ranks: int) -> None:
    """`Prepared.positions` of all ranks; where there is no such axis, each rank has all positions."""
    run = lab.done(seen(ranks))
    assert run.first.plan is not None
    layout, length = run.first.plan.layout, lab.config(seen(ranks)).seq_length
    for stream in _streams(run).values():
        parts: dict[tuple[int, ...], tuple[int, list[int]]] = {}
        for trace in stream:
            place = tuple(i for axis, i in layout.coordinates(trace.rank).items() if layout.role(axis) == "tokens")
            own = _positions(trace, length)
            rank, first = parts.setdefault(place, (trace.rank, own))
            if own != first:
                raise Mismatch(f"ranks {rank} and {trace.rank} to have the same positions", f"{first} and {own}")
        held = [position for _, own in parts.values() for position in own]
        if sorted(held) != list(range(length)):
            missing = sorted(set(range(length)) - set(held))
            twice = sorted({position for position in held if held.count(position) > 1})
            raise Mismatch(
                f"each of the {length} positions of a sample on exactly one of {len(parts)} parts",
                f"on none: {missing or 'none'}; on several: {twice or 'none'}",
            )


def reporting(ranks: int, *, subject: bool = True) -> Episode:
    """Three steps that change no weight, over ragged samples, with evaluations over all samples of a short data set."""
    return episode(
        ranks,
        subject=subject,
        steps=3,
        learning_rate=_STILL,
        data="kit-ragged",
        eval_data="kit-ragged-23",
        eval_every=2,
    )


@check(
    "parity.reported",
    "Loss, gradient norm, tokens and samples of every step and evaluation are reported as `single` reports them.",
    mistake="the layout says of the wrong ranks that they count (the last one along 'stages', the first one along "
    "'copies', all along 'tokens'); accumulate or evaluate gives another loss than the sum of all its micro-batches, or "
    "announces a part of it; or all_sum does not give the sum over all ranks",
)
def reported(lab: Lab, ranks: int) -> None:
    """At a learning rate of next to nothing, so that strategies which train otherwise than `single` can be held to it.

    Every rank's records of three steps, and the loss and number of samples of the evaluations between and after them.
    """
    run, reference = lab.done(reporting(ranks)), lab.done(reporting(1, subject=False))
    norms = None
    if lab.promises("sums_gradients", ranks):
        norms = 1e-4 if lab.plan(ranks).reduce_dtype == "fp32" else _LOW_PRECISION
    for rank, trace in run.traces.items():
        for record, right in zip(trace.records, reference.first.records, strict=True):
            where = f"step {right.global_step} on rank {rank}"
            for name in ("global_step", "samples_seen", "tokens_seen", "valid_tokens", "learning_rate", "skipped"):
                if getattr(record, name) != getattr(right, name):
                    raise Mismatch(f"{name} {getattr(right, name)} in {where}", f"{getattr(record, name)}")
            _close("loss", record.loss, right.loss, TOLERANCE, where)
            if norms is not None:
                _close("grad_norm", record.grad_norm, right.grad_norm, norms, where)
    for name in ("eval_samples", "tokens_seen", "samples_seen"):
        if run.result[name] != reference.result[name]:
            raise Mismatch(f"'{name}' {reference.result[name]} in the result", f"{run.result[name]}")
    for name in ("loss", "loss_first", "eval_loss"):
        _close(name, run.result[name], reference.result[name], TOLERANCE, "the result")


def _close(name: str, found: float | None, right: float, tolerance: float, where: str) -> None:
    if found is None or not math.isclose(found, right, rel_tol=tolerance):
        raise Mismatch(f"{name} {right:.9g} in {where}", f"{found}")


@check(
    "parity.applied",
    "A step that is reported as applied has changed the weights, and all ranks report the same.",
    mistake="optimizer_step(prepared, apply) must return whether the optimizer was applied: False where the strategy or "
    "its library left the step out, and the same on all ranks",
)
def applied(lab: Lab, ranks: int) -> None:
    """The weights of each rank before and after each step, and each rank's records."""
    for asked in (training(ranks), sgd(ranks)):
        run = lab.done(asked)
        for step, records in enumerate(zip(*(trace.records for trace in run.traces.values()), strict=True), 1):
            skipped = [record.skipped for record in records]
            if len(set(skipped)) > 1:
                raise Mismatch(f"all ranks to report alike whether step {step} was skipped", f"skipped: {skipped}")
            changed = _changed(run.whole(step - 1), run.whole(step))
            if changed == skipped[0]:
                what = "changed" if changed else "are those of the step before"
                raise Mismatch(
                    f"weights that step {step} has changed, unless it was skipped",
                    f"they {what}, and it is reported as {'skipped' if skipped[0] else 'applied'}",
                )


def _changed(before: Whole, after: Whole) -> bool:
    return any(not torch.equal(before[key], after[key]) for key in before if key.startswith("model/"))
