"""Strategy ``tp``: every layer's matrices are split over ranks that see the same samples, times data parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mtb_core import ConfigError, Job, MicroBatch, Prepared, Shards, State, Strategy
from mtb_ddp import ReplicatedModule, wrap_ddp
from mtb_fsdp import ShardedModule, sharded_optimizer, wrap_fsdp
from mtb_tp.dropout import SharedMasks, share_dropout
from mtb_tp.plugin import TPOptions, check_vocabulary
from mtb_tp.replicas import Replicas
from mtb_tp.sharding import (
    Slot,
    local_gradient,
    local_part,
    localize,
    parallelize,
    roles_of,
    sequence_parameters,
    to_global,
)
from mtb_tp.vocab import with_own_loss


@attrs.define
class _Engine:
    """The strategy's own values.

    Attributes:
        data: the model over the ranks that see different samples.
        split, whole: trainable parameters of which each tensor-parallel rank has a part, and those that all have.
        partial: parameters whose gradients are still to be summed over tensor-parallel ranks.
        common: checks what tensor-parallel ranks hold in common; None where nobody shares a layer.
        steps_left: steps that the trial is still to take; None: not known.
    """

    data: ReplicatedModule | ShardedModule
    tp_group: dist.ProcessGroup
    slots: Mapping[str, Slot]
    split: Sequence[nn.Parameter]
    whole: Sequence[nn.Parameter]
    partial: Sequence[nn.Parameter]
    masks: SharedMasks | None
    common: Replicas | None
    steps_left: int | None


class TPStrategy(Strategy):
    """torch's ``parallelize_module`` over the inner ranks; DistributedDataParallel or FSDP2 over the outer ones."""

    def prepare(self, job: Job) -> Prepared:
        """Split, fill, replace DTensor parameters by their local parts, wrap for data parallelism."""
        options: TPOptions = job.options
        assert job.ctx.mesh is not None
        dp_mesh, tp_mesh = job.ctx.mesh["dp"], job.ctx.mesh["tp"]
        core = job.build()
        roles = roles_of(core, job.model, options)
        if options.vocab_parallel_loss:
            _check_words(job, core, roles, tp_mesh.size())
        parallelize(core, tp_mesh, roles, job.model.blocks, options)
        group = tp_mesh.get_group()
        shared = tp_mesh.size() > 1
        masks = share_dropout(core, roles, group, job.ctx.device) if shared and not options.sequence_parallel else None
        core = job.materialize(core)
        slots = localize(core)
        # FSDP casts parameters where it gathers them; autocast would gather fp32 and cast afterwards.
        core = job.in_place(core, autocast=dp_mesh.size() == 1 or options.data_parallel == "ddp")
        if options.vocab_parallel_loss:
            with_own_loss(core, group)
        data = _data_parallel(job, core, dp_mesh)
        split = frozenset(name for name, slot in slots.items() if slot.split)
        trainable = {name: p for name, p in core.named_parameters() if p.requires_grad}
        engine = _Engine(
            data=data,
            tp_group=group,
            slots=slots,
            split=[p for name, p in trainable.items() if name in split],
            whole=[p for name, p in trainable.items() if name not in split],
            partial=sequence_parameters(core, roles) if options.sequence_parallel and shared else (),
            masks=masks if masks is not None and masks.active else None,
            common=Replicas(core, split, group) if shared else None,
            steps_left=job.steps,
        )
        return Prepared(data.module, core, sharded_optimizer(job, core), engine)

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """Data-parallel synchronisation as asked; at the end of a step, what sequence parallelism left to be summed."""
        return _micro_batch(prepared, micro)

    def backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """DDP averages over data-parallel ranks; the contract is their sum, which FSDP takes."""
        (loss * prepared.engine.data.loss_factor).backward()

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """Gradients of split parameters, and of those that all tensor-parallel ranks hold."""
        engine: _Engine = prepared.engine
        return [*engine.data.gradients(engine.split), *engine.data.gradients(engine.whole, engine.tp_group.size())]

    def optimizer_step(self, prepared: Prepared, apply: bool) -> bool:
        """After the last one, what ranks hold in common is compared: a run need not save anything."""
        applied = super().optimizer_step(prepared, apply)
        engine: _Engine = prepared.engine
        if engine.steps_left is not None and engine.common is not None:
            engine.steps_left -= 1
            if engine.steps_left == 0:
                engine.common.compare_values()
        return applied

    def state(self, prepared: Prepared) -> State:
        """In coordinates of the whole model, whatever the degrees. Buffers are those of rank 0, as with DDP."""
        engine: _Engine = prepared.engine
        if engine.common is not None:
            engine.common.compare_values()
        engine.data.settle()
        return to_global(super().state(prepared), engine.slots)


def _check_words(job: Job, core: nn.Module, roles: Mapping[str, str], tp: int) -> None:
    """Embedding and output layer can be shared by `tp` ranks, and have all the words of the data.

    Raises:
        ConfigError: they cannot, or have not.
    """
    if job.model.vocab_size is not None:
        check_vocabulary(job.model.vocab_size, tp)
    words = job.config.vocab_size
    for name, role in roles.items():
        weight = getattr(core.get_submodule(name), "weight", None) if role in ("embedding", "head") else None
        if weight is not None and words is not None and weight.shape[0] < words:
            raise ConfigError(
                f"strategy 'tp' has vocab_parallel_loss=true, and the model's '{name}' has {weight.shape[0]} words, but "
                f"the vocabulary of the data has {words}. Give the model at least {words}, or set --vocab-size to what "
                "the data really has."
            )


def _data_parallel(job: Job, core: nn.Module, mesh: DeviceMesh) -> ReplicatedModule | ShardedModule:
    """`core` over the ranks of `mesh`, which see different samples; one rank has nothing to share.

    Buffers are those of rank 0 of the run: tensor-parallel ranks hold the same ones.
    """
    if mesh.size() == 1:
        return ReplicatedModule(core)
    everybody = dist.group.WORLD
    if job.options.data_parallel == "ddp":
        return wrap_ddp(core, mesh, buffers=everybody)
    precision = job.config.precision
    return wrap_fsdp(core, mesh, job.ctx, blocks=job.model.blocks, param_dtype=precision, buffers=everybody)


@contextmanager
def _micro_batch(prepared: Prepared, micro: MicroBatch) -> Iterator[None]:
    engine: _Engine = prepared.engine
    if engine.masks is not None:
        engine.masks.renew()
    with engine.data.micro_batch(micro):
        yield
    if micro.sync and micro.index == micro.count - 1:
        _sum_partial(engine)
        if engine.common is not None:
            engine.common.compare_gradients()


def _sum_partial(engine: _Engine) -> None:
    """Sum the gradients of what saw this rank's positions only, in one all-reduce.

    Once a step is enough: sums over micro-batches and data-parallel ranks may come first.
    """
    if not engine.partial:
        return
    # A gradient that only other ranks have counts as zeros here: the message has the same size on all of them.
    gradients = [g if (g := local_gradient(p)) is not None else torch.zeros_like(local_part(p)) for p in engine.partial]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat, group=engine.tp_group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
