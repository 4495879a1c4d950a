"""Strategy ``ep``: experts are spread over ranks, to which tokens travel; everything else is data parallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn

from mtb_comm import Exchange
from mtb_core import Job, Loss, MicroBatch, Prepared, Shards, State, StepWork, Strategy
from mtb_ddp import ReplicatedModule, wrap_ddp
from mtb_ep.plugin import EPOptions
from mtb_ep.sharding import Sharing, Slot, localize, share_experts, split_experts, to_global
from mtb_ep.sums import ExpertSums

if TYPE_CHECKING:
    from collections.abc import Callable


@attrs.define
class _Engine:
    """The strategy's own values.

    Attributes:
        replicas: the model without its experts, which all ranks hold.
        sums: sums the gradients of the experts.
        slots: places of the split parameters, by name.
        dense, experts: trainable parameters that all ranks hold, and those of this rank's experts.
        copies: ranks that hold the same experts.
        sharing: None where one rank has all experts.
        steps, sent: steps so far, and bytes of rows that this rank sent to others in them.
    """

    replicas: ReplicatedModule
    sums: ExpertSums
    slots: Mapping[str, Slot]
    dense: Sequence[nn.Parameter]
    experts: Sequence[nn.Parameter]
    copies: int
    sharing: Sharing | None
    steps: int = 0
    sent: int = 0


class EPStrategy(Strategy):
    """Experts over the inner ranks (all-to-all of `mtb_comm`), DistributedDataParallel over all ranks for the rest."""

    def prepare(self, job: Job) -> Prepared:
        """Split the experts, fill, replace DTensor parameters by their local parts, wrap what all ranks hold."""
        options: EPOptions = job.options
        assert job.ctx.mesh is not None
        dp, ep = job.ctx.mesh["dp"], job.ctx.mesh["ep"]
        core = job.build()
        slots = split_experts(core, job.model, ep)
        core = job.materialize(core)
        localize(core, slots)
        sharing = Sharing(Exchange(group=ep.get_group())) if ep.size() > 1 else None
        if sharing is not None:
            share_experts(core, job.model, sharing)
        core = job.in_place(core)
        trainable = {name: p for name, p in core.named_parameters() if p.requires_grad}
        dense = [p for name, p in trainable.items() if name not in slots]
        experts = [p for name, p in trainable.items() if name in slots]
        alone = job.ctx.world_size == 1
        ignored = [core.get_parameter(name) for name in slots]  # frozen ones too, or DDP would give them rank 0's
        replicas = ReplicatedModule(core) if alone else wrap_ddp(core, job.ctx.mesh, ignored=ignored)
        engine = _Engine(
            replicas=replicas,
            sums=ExpertSums(experts, dp.get_group() if dp.size() > 1 else None, replicas.loss_factor),
            slots=slots,
            dense=dense,
            experts=experts,
            copies=dp.size(),
            sharing=sharing,
        )
        facts = {"dp": dp.size(), "ep": options.ep, "experts_per_rank": next(iter(slots.values())).count}
        return Prepared(replicas.module, core, job.make_optimizer(core), engine, facts=facts)

    def accumulate(self, prepared: Prepared, work: StepWork) -> Loss:
        """One micro-batch after the other, with the imbalance of the ranks as a figure of each."""
        engine: _Engine = prepared.engine
        if engine.sharing is None:
            return super().accumulate(prepared, work)
        before = engine.sharing.exchange.row_bytes
        total = super().accumulate(
            prepared, attrs.evolve(work, forward=partial(_forward, engine.sharing, work.forward))
        )
        engine.steps += 1
        engine.sent += engine.sharing.exchange.row_bytes - before
        prepared.facts["all_to_all_bytes_per_step"] = engine.sent // engine.steps
        return total

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """The sync contexts of DDP and of the experts."""
        return _micro_batch(prepared.engine, micro)

    def backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """DDP averages over ranks; the contract is their sum. `ExpertSums` takes the factor out again."""
        (loss * prepared.engine.replicas.loss_factor).backward()

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """Gradients of what all ranks hold, and of this rank's experts."""
        engine: _Engine = prepared.engine
        own = [p.grad for p in engine.experts if p.grad is not None]
        return [*engine.replicas.gradients(engine.dense), Shards(own, copies=engine.copies)]

    def state(self, prepared: Prepared) -> State:
        """In coordinates of the whole model, whatever the degrees. Buffers are those of rank 0, as with DDP."""
        engine: _Engine = prepared.engine
        engine.replicas.settle()
        return to_global(super().state(prepared), engine.slots)

    def close(self, prepared: Prepared) -> None:
        """Let go of the experts' parameters."""
        prepared.engine.sums.close()


def _forward(
    sharing: Sharing,
    forward: Callable[[nn.Module, torch.Tensor, torch.Tensor, int], Loss],
    module: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    valid: int,
) -> Loss:
    sharing.imbalances.clear()
    loss = forward(module, inputs, targets, valid)
    figures = sharing.imbalances
    imbalance = torch.tensor(valid * sum(figures) / len(figures), device=loss.sum.device)
    return attrs.evolve(loss, metrics={**loss.metrics, "rank_imbalance": imbalance})


@contextmanager
def _micro_batch(engine: _Engine, micro: MicroBatch) -> Iterator[None]:
    with engine.replicas.micro_batch(micro), engine.sums.micro_batch(micro):
        yield
    if micro.index == micro.count - 1 and not micro.sync and engine.sharing is not None:
        # A step that is never synchronised is a search for the rank whose gradients are not finite. Experts have those
        # of other ranks' tokens, so they must not be taken for this rank's.
        for parameter in engine.experts:
            if parameter.grad is not None:
                parameter.grad.zero_()
