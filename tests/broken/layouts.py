"""Mistakes in what ranks share: stages of a pipeline, positions of a sample, copies, auxiliary losses."""

from __future__ import annotations

import attrs
import torch

from mtb_core import Loss

from . import plans
from .catalogue import MIRRORED, POSITIONS, STAGES, mistake
from .parallel import Mirrored, Positions, Stages
from .right import Replicated


@mistake("parity.reported", right=STAGES, plan=plans.first_stage_counts)
class WrongStageCounts(Stages):
    """The first stage is said to count, and has no loss."""


@mistake("parity.token_weighting", right=STAGES, plan=plans.stages)
class UnweightedMicroBatches(Stages):
    """Each micro-batch's gradient is that of its own mean, whatever number of tokens it has."""

    def _backward(self, prepared, loss, work, valid):
        (loss.objective / max(valid, 1) / len(work.micros)).backward()


@mistake("models.tied", right=STAGES, plan=plans.stages)
class TiedOnOneStage(Stages):
    """Each of the two stages that have a tied weight updates it by its own gradient."""

    def _sum_tied(self, prepared):
        pass


@mistake("models.evaluation", right=STAGES, plan=plans.stages)
class PaddingEvaluated(Stages):
    """In evaluation, targets that do not count are taken for the token 0."""

    def _evaluated(self, prepared, work, x, targets, valid):
        return work.forward(prepared.module, x, targets.clamp(min=0), targets.numel())


@mistake("models.evaluation", right=STAGES, plan=plans.stages)
class LastBatchEvaluated(Stages):
    """The loss of an evaluation is that of the last batch that had anything to predict."""

    def _evaluated(self, prepared, work, x, targets, valid):
        if valid:
            prepared.facts["last"] = float(super()._evaluated(prepared, work, x, targets, valid).sum)
        return Loss(torch.zeros(()))

    def evaluate(self, prepared, work):
        super().evaluate(prepared, work)
        return Loss(torch.tensor(prepared.facts.pop("last", 0.0)))


@mistake("parity.gradients", right=POSITIONS, plan=plans.tokens)
class KeysAndValuesNotSummed(Positions):
    """A rank's keys and values get the gradient of its own queries only."""

    summed = False


@mistake("parity.reported", right=POSITIONS, plan=plans.tokens_as_copies)
class TokensOfOneRankCount(Positions):
    """Ranks with positions of their own are said to be copies, so that the tokens of the first one are all."""


@mistake("parity.positions", right=POSITIONS, plan=plans.tokens)
class PositionsOverlap(Positions):
    """The second rank begins one position too early, and the last position is on none."""

    def _positions(self, job):
        return [max(position - (job.ctx.rank > 0), 0) for position in super()._positions(job)]


@mistake("parity.positions", right=POSITIONS, plan=plans.tokens)
class TokensCountedTwice(Positions):
    """Core is not told of the positions, and gives every rank all of them to count."""

    def _positions(self, job):
        return list(range(job.config.seq_length))

    def _told(self, positions):
        return None


@mistake("parity.gradients", right=MIRRORED, plan=plans.copies_as_data)
class CopiesAsData(Mirrored):
    """Ranks that do the same and sum nothing are said to have samples of their own."""


@mistake("models.extra")
class AuxiliaryLossByRanks(Replicated):
    """The auxiliary loss is multiplied by the number of ranks."""

    def accumulate(self, prepared, work):
        return super().accumulate(prepared, attrs.evolve(work, forward=self._scaled(prepared, work.forward)))

    def _scaled(self, prepared, forward):
        def scaled(*arguments):
            loss = forward(*arguments)
            extra = None if loss.extra is None else loss.extra * prepared.engine.ctx.world_size
            return attrs.evolve(loss, extra=extra)

        return scaled


@mistake("models.extra")
class AuxiliaryLossReported(Replicated):
    """What is trained on is reported, the auxiliary loss included."""

    def accumulate(self, prepared, work):
        def whole(*arguments):
            loss = work.forward(*arguments)
            return attrs.evolve(loss, sum=loss.objective, extra=None)

        return super().accumulate(prepared, attrs.evolve(work, forward=whole))


@mistake("models.extra")
class MetricsLost(Replicated):
    """The metrics of the model's loss are not handed on."""

    def accumulate(self, prepared, work):
        return attrs.evolve(super().accumulate(prepared, work), metrics={})
