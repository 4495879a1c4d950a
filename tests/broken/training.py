"""Mistakes in weights, optimizer, buffers, data and models."""

from __future__ import annotations

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mtb_core import Piece, Prepared, State
from mtb_core.data import loader

from . import plans
from .catalogue import SHARDED, ZERO1, mistake
from .right import Replicated, Sharded, Wrapper


@mistake("parity.initial_weights")
class WeightsPerRank(Replicated):
    """Weights are drawn from each rank's own stream."""

    def _core(self, job):
        core = super()._core(job)
        generator = torch.Generator().manual_seed(job.ctx.rank)
        with torch.no_grad():
            for parameter in core.parameters():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
        return core


@mistake("parity.master_weights")
class Bf16Masters(Replicated):
    """With bf16 the weights themselves are bf16."""

    def _core(self, job):
        core = super()._core(job)
        return core.bfloat16() if job.config.precision == "bf16" else core


@mistake("parity.bf16")
class PrecisionIgnored(Replicated):
    """Whatever precision is asked for, it is fp32."""

    def _core(self, job):
        return job.materialize(job.build())


@mistake("models.activation_checkpointing")
class NothingRecomputed(PrecisionIgnored):
    """Activations are kept, though they were to be recomputed."""


@mistake("parity.replicas")
class RankDependentBranch(Replicated):
    """The first rank does something to its weights that the others do not."""

    def optimizer_step(self, prepared, apply):
        applied = super().optimizer_step(prepared, apply)
        if dist.get_rank() == 0:
            with torch.no_grad():
                prepared.trainable[0].clamp_(-0.01, 0.01)
        return applied


@mistake("parity.gradients_cleared")
class ForgottenZeroGrad(Replicated):
    """Gradients of a step are still there in the next."""

    def optimizer_step(self, prepared, apply):
        if apply:
            prepared.optimizer.step()
        return apply


@mistake("parity.weights")
class OptimizerBeforeWrapping(Replicated):
    """The optimizer is made over the parameters as they were before they were materialised."""

    def prepare(self, job):
        core = job.build()
        optimizer = job.make_optimizer(core)
        core = job.in_place(job.materialize(core))
        return Prepared(self._wrap(core), core, optimizer, job)


@mistake("parity.weights")
class DecayOnEverything(Replicated):
    """All parameters are in one group, so that weight decay reaches those of one dimension too."""

    def _optimizer(self, job, core):
        groups = job.optimizer_groups(core)
        whole = {**groups[0], "params": [p for group in groups for p in group["params"]]}
        return job.optimizer.factory([whole], **job.optimizer.defaults)


@mistake("parity.data")
class DataByRankOnly(Replicated):
    """What a rank sees depends on the rank only: every micro-batch of a step is the same; patches core's loader."""

    def prepare(self, job):
        own = loader._plan

        def plan(*arguments):
            for steps in own(*arguments):
                yield attrs.evolve(steps, ids=np.repeat(steps.ids[:, :1], steps.ids.shape[1], axis=1))

        loader._plan = plan
        return super().prepare(job)


@mistake("models.frozen")
class FrozenUpdated(Replicated):
    """Frozen parameters are trained with the others."""

    def _core(self, job):
        return super()._core(job).requires_grad_(True)


@mistake("models.tied")
class TiesSeparated(Replicated):
    """A parameter that two layers share becomes two."""

    def _core(self, job):
        core = super()._core(job)
        if job.config.tie_embeddings:
            core.head.weight = nn.Parameter(core.head.weight.detach().clone())
        return core


@mistake("models.buffers")
class BuffersNotSynchronised(Replicated):
    """Each rank saves its own buffers."""

    def _share_buffers(self, prepared):
        pass


class Hiding(Wrapper):
    """Keeps the module out of its submodules."""

    def __init__(self, inner):
        super().__init__(None)
        self._hidden = [inner]

    def forward(self, *arguments):
        self.armed = self.synchronise
        return self._hidden[0](*arguments)


@mistake("models.mode")
class ModeNotPassedOn(Replicated):
    """Train and eval mode do not reach the module, of which the wrapper does not know as a submodule."""

    def _wrap(self, core):
        return Hiding(core)


class OneWay(Wrapper):
    """Does not come back from eval mode."""

    evaluated = False

    def train(self, mode=True):
        self.evaluated = self.evaluated or not mode
        return super().train(not self.evaluated)


@mistake("models.mode")
class TrainModeLeftOff(Replicated):
    """After an evaluation training goes on in eval mode."""

    def _wrap(self, core):
        return OneWay(core)


@mistake("models.odd_dimensions", right=SHARDED)
class RemainderLost(Sharded):
    """Elements that the ranks do not divide are updated by none of them."""

    def _range(self, parameter, rank):
        share = parameter.numel() // dist.get_world_size()
        return rank * share, (rank + 1) * share


@mistake("models.unused", plan=plans.copes_with_missing_gradients)
class DoesNotCope(Replicated):
    """The plan says that parameters without gradients are no trouble, but no gradient is summed then."""


@mistake("models.sharded", plan=plans.sharded)
class NotSharded(Replicated):
    """The plan says that no rank holds all of the model, but every one does."""


@mistake("parity.bf16_moments")
class MomentsInBf16(Replicated):
    """With bf16, optimizer state is kept in bf16 between steps."""

    def optimizer_step(self, prepared, apply):
        applied = super().optimizer_step(prepared, apply)
        if prepared.engine.config.precision == "bf16":
            for values in prepared.optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    values[name].copy_(values[name].bfloat16())
        return applied


@mistake("models.buffers")
class BuffersAdded(Replicated):
    """Buffers are added up over ranks, so that they grow with their number."""

    def _share_buffers(self, prepared):
        for buffer in prepared.core.buffers():
            dist.all_reduce(buffer)


@mistake("models.buffers")
class RunningMeansAdded(Replicated):
    """Only averages are added up over ranks; counters are those of the first."""

    def _share_buffers(self, prepared):
        for buffer in prepared.core.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
            else:
                dist.broadcast(buffer, src=0)


@mistake("models.held", plan=plans.sharded, right=ZERO1)
class ShardedOnPaper(Sharded):
    """Each rank keeps and updates all of the optimizer's state; what it shows of it is a share."""

    def prepare(self, job):
        return Replicated.prepare(self, job)

    def gradients(self, prepared):
        return Replicated.gradients(self, prepared)

    def optimizer_step(self, prepared, apply):
        return Replicated.optimizer_step(self, prepared, apply)

    def state(self, prepared):
        whole = Replicated.state(self, prepared)
        return State({key: self._share(own) for key, own in whole.pieces.items()})

    def _share(self, pieces):
        (piece,) = pieces
        if not piece.shape:
            return pieces
        rows = -(-piece.shape[0] // dist.get_world_size())
        start = min(dist.get_rank() * rows, piece.shape[0])
        part = piece.tensor[start : start + rows]
        return [Piece(part, piece.shape, (start, *piece.offset[1:]))] if len(part) else []
