"""Mistakes in what the ranks agree on: sums, votes, whether a step was applied; and in acting on it."""

from __future__ import annotations

import attrs
import torch.distributed as dist

from mtb_core import Control
from mtb_core.train import agreement, trial

from .catalogue import mistake
from .right import Replicated


@mistake("parity.applied")
class ClaimsApplied(Replicated):
    """Every second update is left out, and reported as applied."""

    def __init__(self):
        self._steps = 0

    def optimizer_step(self, prepared, apply):
        self._steps += 1
        super().optimizer_step(prepared, apply=apply and self._steps % 2 == 1)
        return apply


@mistake("parity.applied")
class AppliedOnOneRank(Replicated):
    """Only the first rank says that the optimizer was applied."""

    def optimizer_step(self, prepared, apply):
        return super().optimizer_step(prepared, apply) and dist.get_rank() == 0


@mistake("parity.reported")
class LargestInPlaceOfSum(Replicated):
    """Where the ranks agree they take the largest number, which is NaN for none."""

    def all_sum(self, prepared, vector):
        return dist.all_reduce(vector, dist.ReduceOp.MAX, async_op=True).wait


@mistake("parity.reported")
class RankLeftOut(Replicated):
    """The last rank's numbers are missing in the sum."""

    def all_sum(self, prepared, vector):
        if dist.get_rank() == dist.get_world_size() - 1:
            vector.zero_()
        return super().all_sum(prepared, vector)


@mistake("failures.nonfinite")
class NanLostInSum(Replicated):
    """Numbers that are not finite become 0 before they are summed."""

    def all_sum(self, prepared, vector):
        vector.nan_to_num_(0.0, 0.0, 0.0)
        return super().all_sum(prepared, vector)


@mistake("parity.reported")
class AnnouncedTooEarly(Replicated):
    """What is announced is the loss of all micro-batches but the last."""

    def accumulate(self, prepared, work):
        losses = []

        def forward(*arguments):
            losses.append(work.forward(*arguments))
            return losses[-1]

        def announce(total):
            work.announce(attrs.evolve(total, sum=total.sum - losses[-1].sum.detach()))

        return super().accumulate(prepared, attrs.evolve(work, forward=forward, announce=announce))


@mistake("parity.replicas")
class LastSyncForgotten(Replicated):
    """A schedule of its own leaves the synchronisation of the last micro-batch out."""

    def accumulate(self, prepared, work):
        micros = [attrs.evolve(micro, sync=False) for micro in work.micros]
        return super().accumulate(prepared, attrs.evolve(work, micros=micros))


@mistake("failures.requests")
class VoteOfOneRankOnly(Replicated):
    """A rank acts on its own requests alone; patches core's agreement."""

    def prepare(self, job):
        end = agreement.Agreement.end

        def alone(self):
            agreed = end(self)
            finish = float(agreed.own.finish is not None)
            return attrs.evolve(agreed, votes=attrs.evolve(agreed.votes, finish=finish))

        agreement.Agreement.end = alone
        return super().prepare(job)


@mistake("failures.requests")
class SaveRequestLost(Replicated):
    """Nobody hears of a request to save; patches core's requests."""

    def prepare(self, job):
        Control.save = lambda self: None
        return super().prepare(job)


@mistake("failures.requests")
class SkipIgnored(Replicated):
    """The optimizer is applied, whatever core says, and the step reported as skipped."""

    def optimizer_step(self, prepared, apply):
        super().optimizer_step(prepared, apply=True)
        return apply


@mistake("failures.roll_back")
class DataNotSetBack(Replicated):
    """Going back leaves the place in the data where it was; patches core's loader of a trial."""

    def prepare(self, job):
        open_at, places = trial._Data.open, []

        def forward_only(self, samples_seen):
            places.append(72 if places else samples_seen)
            return open_at(self, places[-1])

        trial._Data.open = forward_only
        return super().prepare(job)


@mistake("failures.roll_back")
class OptimizerNotSetBack(Replicated):
    """After going back in the middle of a run, the optimizer's averages begin anew."""

    def state_loaded(self, prepared, state):
        for values in prepared.optimizer.state.values():
            if float(values["step"]) and prepared.engine.config.resume is None:
                values["exp_avg"].zero_()
