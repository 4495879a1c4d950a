"""Two right strategies, by hand over ``torch.distributed``: replicas, and replicas with a sharded optimizer."""

from __future__ import annotations

import contextlib

import attrs
import torch
import torch.distributed as dist
from torch import nn

from mtb_core import Piece, Prepared, Shards, State, Strategy, create_missing_state, fragment_pieces, module_state


class Wrapper(nn.Module):
    """Reads in forward whether backward is to sum gradients over ranks, as DistributedDataParallel does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.synchronise = True
        self.armed = False

    def forward(self, *arguments):
        self.armed = self.synchronise
        return self.inner(*arguments)


class Replicated(Strategy):
    """Every rank holds the model; gradients are averaged over ranks, parameter by parameter, after backward."""

    def prepare(self, job):
        core = self._core(job)
        return Prepared(self._wrap(core), core, self._optimizer(job, core), job)

    def _core(self, job):
        return job.in_place(job.materialize(job.build()))

    def _wrap(self, core):
        return Wrapper(core)

    def _optimizer(self, job, core):
        return job.make_optimizer(core)

    def micro_batch(self, prepared, micro):
        return contextlib.nullcontext() if micro.sync else self._unsynchronised(prepared)

    @contextlib.contextmanager
    def _unsynchronised(self, prepared):
        prepared.module.synchronise = False
        try:
            yield
        finally:
            prepared.module.synchronise = True

    def backward(self, prepared, loss):
        (loss * dist.get_world_size()).backward()
        # Where a gradient is missing ranks would not call alike; core says so.
        if prepared.module.armed and all(p.grad is not None for p in prepared.trainable):
            self._reduce(prepared)
            self._share_buffers(prepared)

    def _reduce(self, prepared):
        """A mean, so that what an earlier micro-batch has brought into agreement stays as it is."""
        for parameter in prepared.trainable:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def _share_buffers(self, prepared):
        for buffer in prepared.core.buffers():
            dist.broadcast(buffer, src=0)

    def gradients(self, prepared):
        tensors = [p.grad for p in prepared.trainable if p.grad is not None]
        return [Shards(tensors, copies=dist.get_world_size())]


@attrs.frozen
class Owned:
    """The elements of a parameter that this rank updates, as a parameter of their own in the same memory."""

    name: str
    whole: nn.Parameter
    shard: nn.Parameter
    start: int


class Sharded(Replicated):
    """ZeRO stage 1: each rank updates its range of elements of every parameter, and has optimizer state for it only."""

    def prepare(self, job):
        core = self._core(job)
        owned = [self._own(name, p, job.ctx.rank) for name, p in core.named_parameters() if p.requires_grad]
        shards = {id(own.whole): own.shard for own in owned}
        groups = [{**g, "params": [shards[id(p)] for p in g["params"]]} for g in job.optimizer_groups(core)]
        return Prepared(self._wrap(core), core, job.optimizer.factory(groups, **job.optimizer.defaults), owned)

    def _own(self, name, parameter, rank):
        start, stop = self._range(parameter, rank)
        return Owned(name, parameter, nn.Parameter(parameter.detach().view(-1)[start:stop]), start)

    def _range(self, parameter, rank):
        share = -(-parameter.numel() // dist.get_world_size())
        return min(rank * share, parameter.numel()), min((rank + 1) * share, parameter.numel())

    def gradients(self, prepared):
        for own in prepared.engine:
            if own.whole.grad is not None:
                own.shard.grad = own.whole.grad.reshape(-1)[own.start : own.start + own.shard.numel()]
        return [Shards([own.shard.grad for own in prepared.engine if own.shard.grad is not None], copies=1)]

    def optimizer_step(self, prepared, apply):
        if apply:
            prepared.optimizer.step()
            self._share_weights(prepared)
        for own in prepared.engine:
            own.whole.grad = own.shard.grad = None
        return apply

    def _share_weights(self, prepared):
        for own in prepared.engine:
            for rank in range(dist.get_world_size()):
                start, stop = self._range(own.whole, rank)
                if start < stop:
                    dist.broadcast(own.whole.detach().view(-1)[start:stop], src=rank)

    def state(self, prepared):
        create_missing_state(prepared.optimizer)
        pieces = dict(module_state(prepared.core, torch.optim.SGD(prepared.core.parameters())).pieces)
        for own in prepared.engine:
            for key, value in prepared.optimizer.state.get(own.shard, {}).items():
                pieces[f"optim/{own.name}/{key}"] = self._optimizer_pieces(own, value)
        return State(pieces)

    def _optimizer_pieces(self, own, value):
        if not value.dim():
            return fragment_pieces(value.view(1), (), 0)
        return fragment_pieces(value, tuple(own.whole.shape), own.start)


class Gathering(Replicated):
    """Sums by an all-gather, as compressed reductions do: right, though no reduction is ever seen."""

    def _reduce(self, prepared):
        for parameter in prepared.trainable:
            parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, parameter.grad)
            parameter.grad.copy_(torch.stack(parts).mean(0))


@attrs.define
class Kept:
    """What `OwnState` keeps beside model and optimizer."""

    config: object
    accumulation: int
    mean: torch.Tensor
    count: int = 0


class OwnState(Replicated):
    """Keeps state of its own, a tensor under its name and a number, which are saved and given back."""

    def prepare(self, job):
        kept = Kept(job.config, job.accumulation, torch.zeros(3))
        return attrs.evolve(super().prepare(job), engine=kept)

    def optimizer_step(self, prepared, apply):
        if apply:
            prepared.engine.mean.lerp_(prepared.trainable[0].detach().reshape(-1)[:3], 0.5)
            prepared.engine.count += 1
        return super().optimizer_step(prepared, apply)

    def state(self, prepared):
        own = {"strategy/right-own-state/mean": [Piece(prepared.engine.mean, (3,), (0,))]}
        return State({**super().state(prepared).pieces, **own}, {"count": prepared.engine.count})

    def state_loaded(self, prepared, state):
        prepared.engine.count = state.scalars.get("count", 0)
