"""More right strategies by hand, one for each role of an axis, and one whose replicas differ between synchronisations."""

from __future__ import annotations

import contextlib

import attrs
import torch
import torch.distributed as dist
from torch import nn

from mtb_core import Loss, Piece, Prepared, Shards, State, Strategy


class Stages(Strategy):
    """A pipeline: each rank has a part of the model's chain, and one micro-batch at a time goes forward and back."""

    def prepare(self, job):
        core = self._part(job, self._build(job))
        core = job.in_place(job.materialize(core))
        return Prepared(core, core, job.make_optimizer(core), job)

    def _build(self, job):
        return job.build()

    def _part(self, job, core):
        rank, size, chain = job.ctx.rank, job.ctx.world_size, job.model.chain
        mine = [name for i, name in enumerate(chain) if i * size // len(chain) == rank]
        # The last rank keeps an embedding that is tied to its layer, so that the weight has the same name everywhere.
        kept = {*mine, *(chain[:1] if self._tied(job) and rank == size - 1 else ())}
        for name in chain:
            if name not in kept:
                parent, _, leaf = name.rpartition(".")
                setattr(core.get_submodule(parent), leaf, nn.Identity())

        def forward(self, x):
            for name in mine:
                x = self.get_submodule(name)(x)
            return x

        core.__class__ = type("Part", (type(core),), {"forward": forward})
        return core

    def _tied(self, job):
        return job.config.tie_embeddings

    def accumulate(self, prepared, work):
        total = Loss(torch.zeros(()))
        for inputs, targets, valid in zip(work.inputs, work.targets, work.valid, strict=True):
            x = self._received(prepared, inputs)
            if self._last():
                loss = work.forward(prepared.module, x, targets, valid)
                self._backward(prepared, loss, work, valid)
                total = loss.plus(total)
            else:
                y = prepared.module(x)
                dist.send(y.detach().contiguous(), dist.get_rank() + 1)
                gradient = torch.empty_like(y)
                dist.recv(gradient, dist.get_rank() + 1)
                y.backward(gradient)
            if dist.get_rank():
                dist.send(x.grad, dist.get_rank() - 1)
        self._sum_tied(prepared)
        return total

    def _backward(self, prepared, loss, work, valid):
        (loss.objective * work.share).backward()

    def evaluate(self, prepared, work):
        total = Loss(torch.zeros(()))
        for inputs, targets, valid in work.batches:
            x = self._received(prepared, inputs)
            if self._last():
                total = self._evaluated(prepared, work, x, targets, valid).plus(total)
            else:
                dist.send(prepared.module(x).contiguous(), dist.get_rank() + 1)
        return total

    def _evaluated(self, prepared, work, x, targets, valid):
        return work.forward(prepared.module, x, targets, valid)

    def _last(self):
        return dist.get_rank() == dist.get_world_size() - 1

    def _received(self, prepared, inputs):
        if not dist.get_rank():
            return inputs
        x = torch.empty(*inputs.shape, prepared.engine.config.d_model)
        dist.recv(x, dist.get_rank() - 1)
        return x.requires_grad_(torch.is_grad_enabled())

    def _sum_tied(self, prepared):
        """Of two ranks at most: the first one and the last one have the tied weight."""
        if self._tied(prepared.engine) and dist.get_world_size() > 1:
            dist.all_reduce(prepared.core.tokens.weight.grad)

    def gradients(self, prepared):
        tied = prepared.core.tokens.weight if self._tied(prepared.engine) else None
        alone = [p.grad for p in prepared.trainable if p is not tied]
        return [Shards(alone, 1), Shards([] if tied is None else [tied.grad], dist.get_world_size())]


class _Gather(torch.autograd.Function):
    """All ranks' parts along dimension 2; backward gives each the sum of what all ranks made of its part."""

    @staticmethod
    def forward(ctx, x, summed):
        ctx.summed, ctx.length = summed, x.shape[2]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if ctx.summed:
            dist.all_reduce(gradient)
        return gradient.narrow(2, dist.get_rank() * ctx.length, ctx.length), None


class _Attention(nn.Module):
    """Attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, first, summed):
        super().__init__()
        self.first, self.summed = first, summed

    def forward(self, q, k, v, dropout):
        k, v = _Gather.apply(k, self.summed), _Gather.apply(v, self.summed)
        rows = torch.arange(self.first, self.first + q.shape[2])
        seen = rows[:, None] >= torch.arange(k.shape[2])[None, :]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)


class Summing(Strategy):
    """Every rank holds the model; gradients are summed after the last micro-batch. All ranks see the same, or not."""

    def prepare(self, job):
        core = job.in_place(job.materialize(job.build()))
        return Prepared(core, core, job.make_optimizer(core), job)

    @contextlib.contextmanager
    def micro_batch(self, prepared, micro):
        yield
        for parameter in prepared.trainable if micro.sync else ():
            self._sum(parameter.grad)

    def _sum(self, gradient):
        dist.all_reduce(gradient)

    def gradients(self, prepared):
        return [Shards([p.grad for p in prepared.trainable], copies=dist.get_world_size())]


class Mirrored(Summing):
    """All ranks do the same on the same samples, as long as nothing is drawn at random."""

    def _sum(self, gradient):
        pass


class Positions(Summing):
    """Context parallelism: each rank has its positions of every sample, and gathers keys and values."""

    summed = True

    def prepare(self, job):
        core, positions = job.build(), self._positions(job)
        at = torch.tensor(positions)
        for name, module in list(core.named_modules()):
            if job.model.role(name) == "attention":
                parent, _, leaf = name.rpartition(".")
                setattr(core.get_submodule(parent), leaf, _Attention(positions[0], self.summed))
            elif job.model.role(name) == "stem":
                module.register_forward_pre_hook(lambda _, x, k: (x, {**k, "positions": at}), with_kwargs=True)
        core = job.in_place(job.materialize(core))
        return Prepared(core, core, job.make_optimizer(core), job, positions=self._told(positions))

    def _positions(self, job):
        length = job.config.seq_length // job.ctx.world_size
        return list(range(job.ctx.rank * length, (job.ctx.rank + 1) * length))

    def _told(self, positions):
        return positions


@attrs.define
class Local:
    """What a rank of `LocalSteps` keeps: its steps so far, and copies of its state for checkpoints."""

    rank: int
    steps: int = 0
    kept: dict = attrs.field(factory=dict)


class LocalSteps(Strategy):
    """Local SGD: each rank trains by itself, and every second step the ranks take the mean of their weights."""

    def prepare(self, job):
        core = job.in_place(job.materialize(job.build()))
        return Prepared(core, core, job.make_optimizer(core), Local(job.ctx.rank))

    def backward(self, prepared, loss):
        (loss * dist.get_world_size()).backward()

    def optimizer_step(self, prepared, apply):
        applied = super().optimizer_step(prepared, apply)
        prepared.engine.steps += applied
        if applied and prepared.engine.steps % 2 == 0:
            for weight in (p.detach() for p in prepared.core.parameters()):
                dist.all_reduce(weight)
                weight.div_(dist.get_world_size())
        return applied

    def state(self, prepared):
        """Each rank's own state under names of its own, beside that under the common ones, of which one rank's is saved."""
        state, local, world = super().state(prepared), prepared.engine, dist.get_world_size()
        for key, (piece,) in state.pieces.items():
            local.kept.setdefault(key, torch.empty_like(piece.tensor)).copy_(piece.tensor)
        own = {
            f"strategy/local-steps/{key}": [Piece(kept[None], (world, *kept.shape), (local.rank, *[0] * kept.dim()))]
            for key, kept in local.kept.items()
        }
        return State({**state.pieces, **own}, {"steps": local.steps})

    def state_loaded(self, prepared, state):
        if "steps" in state.scalars:  # a checkpoint of another strategy has none
            prepared.engine.steps = state.scalars["steps"]
            for key, kept in prepared.engine.kept.items():
                state.pieces[key][0].tensor.copy_(kept)
