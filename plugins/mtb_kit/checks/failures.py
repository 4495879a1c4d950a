"""What happens when something goes wrong on one rank: all ranks end, at one step, and the first cause is named."""

from __future__ import annotations

import math
import os
import signal

from mtb_checkpoint import verify_checkpoint
from mtb_core.ckpt.layout import step_name
from mtb_kit.checking import check
from mtb_kit.checks.parity import TOLERANCE
from mtb_kit.episodes import Episode, episode
from mtb_kit.lab import Lab, Run
from mtb_kit.probes_failures import (
    FailInForward,
    InfinityInBackward,
    NanInLoss,
    Signalled,
    StateAtEnd,
    survivors,
)
from mtb_kit.states import Mismatch, equal_bitwise, equal_within

#: The step at which things go wrong.
BAD = 2


def _counting(lab: Lab, ranks: int) -> list[int]:
    """The ranks whose loss counts."""
    layout = lab.plan(ranks).layout
    return [rank for rank in range(ranks) if layout.counts_loss(rank)]


@check(
    "failures.nonfinite",
    "A loss that is not finite on one rank stops all ranks at that step, before the update, and names the rank.",
    mistake="the non-finite value was hidden (nan_to_num, an own check that skips; all_sum must keep NaN), or the optimizer stepped before core's "
    "check: updates belong in optimizer_step(prepared, apply) alone",
)
def nonfinite(lab: Lab, ranks: int) -> None:
    """On the first rank that counts loss, with gradients that are not finite either; on the last, with those that are."""
    counting = _counting(lab, ranks)
    for rank, gradients in ((counting[0], True), (counting[-1], False)):
        probes = (NanInLoss(rank, BAD, gradients), StateAtEnd(BAD))
        run = lab.run(episode(ranks, states=(BAD - 1,), probes=probes))
        _stopped_by_agreement(run, rank)
        equal_bitwise(run.whole(BAD), run.whole(BAD - 1), f"the state after a NaN on rank {rank} stopped step {BAD}")


def _stopped_by_agreement(run: Run, named: int | None = None) -> None:
    """`named`: the rank that must be named, if one must."""
    expected = f"all ranks to stop at step {BAD}" + ("" if named is None else f", with rank {named} named")
    for other in range(run.episode.ranks):
        trace = run.traces.get(other)
        failure = None if trace is None or trace.result is None else trace.result["failure"]
        if trace is None or failure is None:
            raise Mismatch(expected, f"rank {other} did not: {run.why()}")
        if (failure["kind"], failure["step"]) != ("NonFinite", BAD) or named not in (None, failure["rank"]):
            raise Mismatch(expected, f"on rank {other}: {failure['text']}")
        if len(trace.records) != BAD - 1:
            raise Mismatch(f"{BAD - 1} complete step on rank {other}", f"{len(trace.records)}")


@check(
    "failures.nonfinite_gradient",
    "A gradient that is not finite on one rank stops all ranks at that step, before the update, with a finite loss too.",
    mistake="gradients were cleaned (nan_to_num) before or while they were summed, or what gradients(prepared) gives is "
    "not all that the optimizer uses",
)
def nonfinite_gradient(lab: Lab, ranks: int) -> None:
    """On the last rank that counts loss; it cannot always be named: once gradients are summed, all ranks have it."""
    last = _counting(lab, ranks)[-1]
    run = lab.run(episode(ranks, states=(BAD - 1,), probes=(InfinityInBackward(last, BAD), StateAtEnd(BAD))))
    _stopped_by_agreement(run)
    equal_bitwise(run.whole(BAD), run.whole(BAD - 1), f"the state after an infinite gradient stopped step {BAD}")


@check(
    "failures.skipped_update",
    "With --on-nonfinite skip all ranks leave out that update alone, and go on alike.",
    mistake="optimizer_step(prepared, apply=False) must change nothing and clear every gradient, also those that a wrapper "
    "or an engine keeps",
)
def skipped_update(lab: Lab, ranks: int) -> None:
    """A NaN on the last rank that counts loss; the state of the skipped step is that of the step before."""
    run = lab.done(_skipping(ranks, _counting(lab, ranks)[-1]))
    for rank, trace in run.traces.items():
        skipped = [record.global_step for record in trace.records if record.skipped]
        if skipped != [BAD]:
            raise Mismatch(f"step {BAD} to be skipped, and no other", f"rank {rank} skipped {skipped}")
        bad = [r.global_step for r in trace.records if r.global_step != BAD and not math.isfinite(r.loss)]
        if bad:
            raise Mismatch(f"finite losses after the skipped step {BAD}", f"rank {rank}: not at steps {bad}")
        if [r.loss for r in trace.records if r.global_step != BAD] != [
            r.loss for r in run.first.records if r.global_step != BAD
        ]:
            raise Mismatch("the same losses on all ranks", f"rank {rank}: {trace.losses}; rank 0: {run.first.losses}")
    equal_bitwise(run.whole(BAD), run.whole(BAD - 1), f"the state after the skipped step {BAD}")
    if lab.promises("exact", ranks):
        reference = lab.done(_skipping(1, 0, subject=False))
        seen, right = run.whole(4), reference.whole(4)
        names = [key for key in right if key.startswith("model/")]
        equal_within(
            {key: seen[key] for key in names if key in seen},
            {key: right[key] for key in names},
            TOLERANCE,
            "weights two steps after the skipped one",
        )


def _skipping(ranks: int, rank: int, *, subject: bool = True) -> Episode:
    return episode(
        ranks,
        subject=subject,
        states=(1, 2, 4),
        probes=(NanInLoss(rank, BAD),),
        on_nonfinite="skip",
        adam_eps=1e-6,
    )


@check(
    "failures.exception",
    "An exception on one rank ends all ranks, and is what is reported.",
    mistake="the exception was caught, or close(prepared) or the context of micro_batch waits for other ranks while it "
    "passes; they must not communicate then",
)
def exception(lab: Lab, ranks: int) -> None:
    """In the model's forward, on the last rank."""
    run = lab.run(episode(ranks, probes=(FailInForward(ranks - 1, BAD),)))
    _first_cause(run, ranks - 1, "RaisedOnPurpose")


@check(
    "failures.killed",
    "A rank that dies ends all ranks, and is what is reported.",
    mistake="a process that the strategy has started outlives its rank: start it in the rank's own session, and have it "
    "end with its parent; or an error that is caught and tried again keeps another rank from ending",
)
def killed(lab: Lab, ranks: int) -> None:
    """SIGKILL in the model's forward, on the last rank; nothing that a rank has started goes on."""
    mark = f"{lab.folder}/killed-{ranks}"
    run = lab.run(episode(ranks, probes=(FailInForward(ranks - 1, BAD, kill=True, mark=mark),)))
    _first_cause(run, ranks - 1, "signal SIGKILL")
    left = survivors(mark)
    for number in left:
        os.kill(number, signal.SIGKILL)
    if left:
        raise Mismatch("all that the ranks had started to end with them", f"still running: {', '.join(left.values())}")


def _first_cause(run: Run, rank: int, kind: str) -> None:
    failure = run.failure
    if run.exit_reason != "failed" or failure is None or (failure.rank, failure.kind) != (rank, kind):
        raise Mismatch(f"a run that fails with {kind} on rank {rank} as the first cause", run.why())


@check(
    "failures.stop",
    "A signal to one rank stops all ranks at the same step, with a checkpoint of it.",
    mistake="a handler for SIGTERM was installed by the strategy or its library, so that core's did not see it",
)
def stop(lab: Lab, ranks: int) -> None:
    """SIGTERM to the last rank after the first step."""
    folder = lab.folder / f"stopped-{ranks}"
    asked = episode(ranks, probes=(Signalled(ranks - 1, 1, signal.SIGTERM),), steps=8, checkpoint_dir=str(folder))
    run = lab.run(asked)
    if run.exit_reason != "stopped" or run.traces.keys() != set(range(ranks)):
        raise Mismatch("a run that ends with 'stopped' on all ranks", run.why())
    steps = {rank: trace.records[-1].global_step for rank, trace in run.traces.items()}
    if len(set(steps.values())) != 1:
        raise Mismatch("all ranks to stop at the same step", f"steps {steps}")
    integrity = verify_checkpoint(folder / step_name(steps[0])) if (folder / step_name(steps[0])).is_dir() else None
    if integrity is None or not integrity.ok:
        problem = "there is none" if integrity is None else integrity.problems[0].problem
        raise Mismatch(f"a complete checkpoint of step {steps[0]}, the last one", problem)
