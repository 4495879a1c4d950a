"""Strategy ``tp``: every layer's matrices are split over ranks that see the same samples, times data parallelism."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mtb_core import BufferSync, ConfigError, Job, MicroBatch, Prepared, Shards, State, Strategy, broadcast_buffers
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
    """What the strategy keeps.

    Attributes:
        replicas: ranks over which DDP averages.
        copies: how many ranks hold the same elements of a split parameter, and of one that is not split.
        partial: parameters whose gradients are still to be summed over tensor-parallel ranks.
        common: checks what tensor-parallel ranks hold in common; None where nobody shares a layer.
        buffers: shares them over ranks that see different samples; None where all see the same.
        steps_left: steps that the trial is still to take; None: not known.
    """

    replicas: int
    tp_group: dist.ProcessGroup
    slots: Mapping[str, Slot]
    split: frozenset[int]
    copies: tuple[int, int]
    partial: Sequence[nn.Parameter]
    masks: SharedMasks | None
    common: Replicas | None
    buffers: BufferSync | None
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
        core = job.in_place(core)
        if options.vocab_parallel_loss:
            with_own_loss(core, group)
        module = _data_parallel(job, core, dp_mesh)
        split = frozenset(id(p) for name, p in core.named_parameters() if slots[name].split)
        dp, tp = dp_mesh.size(), tp_mesh.size()
        engine = _Engine(
            replicas=dp if options.data_parallel == "ddp" else 1,
            tp_group=group,
            slots=slots,
            split=split,
            copies=(dp, dp * tp) if options.data_parallel == "ddp" else (1, tp),
            partial=sequence_parameters(core, roles) if options.sequence_parallel and shared else (),
            masks=masks if masks is not None and masks.active else None,
            common=Replicas(core, frozenset(n for n, s in slots.items() if s.split), group) if shared else None,
            buffers=BufferSync.of(core) if dp > 1 else None,
            steps_left=job.steps,
        )
        return Prepared(module, core, _optimizer(job, core), engine)

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """Data-parallel synchronisation as asked; at the end of a step, what sequence parallelism left to be summed."""
        return _micro_batch(prepared, micro)

    def backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """DDP averages over data-parallel ranks; the contract is their sum, which FSDP takes."""
        (loss * prepared.engine.replicas).backward()

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """Gradients of split parameters, and of those that all tensor-parallel ranks hold."""
        engine: _Engine = prepared.engine
        parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for parameter in prepared.trainable:
            gradient = local_gradient(parameter)
            if gradient is not None:
                parts[id(parameter) not in engine.split].append(gradient)
        return [Shards(tensors, copies) for tensors, copies in zip(parts, engine.copies, strict=True)]

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
        _reshard(prepared.core)
        if engine.common is not None:
            engine.common.compare_values()
        if engine.buffers is not None:
            broadcast_buffers(prepared.core.buffers())
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


def _data_parallel(job: Job, core: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """`core` as it is called on a micro-batch. On one data-parallel rank there is nothing to wrap."""
    if mesh.size() == 1:
        return core
    if job.options.data_parallel == "fsdp":
        _refuse_scalars(core)
        for name in job.model.blocks:
            fully_shard(core.get_submodule(name), mesh=mesh)
        fully_shard(core, mesh=mesh, reshard_after_forward=False)
        for part in _fsdp_modules(core):
            part.set_force_sum_reduction_for_comms(True)  # also what gloo can do
            part.set_gradient_divide_factor(1.0)
        # It warns that an operation in place on the model's output would be wrong; nobody does one.
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({type(core).__name__}\) returned a view")
        return core
    device = torch.device(job.ctx.device)
    module = DistributedDataParallel(
        core,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,  # `BufferSync` does, over all ranks
    )
    _use_final_buckets(module)
    return module


def _refuse_scalars(core: nn.Module) -> None:
    """FSDP2 shards a parameter along its first dimension."""
    scalars = [name for name, p in core.named_parameters() if not p.dim()]
    if scalars:
        raise ConfigError(
            f"strategy 'tp' has data_parallel=fsdp, which cannot shard parameters without dimensions; the model has "
            f"{', '.join(scalars)}. Give them the shape [1], or use data_parallel=ddp."
        )


def _fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _reshard(module: nn.Module) -> None:
    """Bring back FSDP's shards, which a forward without backward leaves gathered."""
    for part in _fsdp_modules(module):
        part.reshard()


def _optimizer(job: Job, core: nn.Module) -> torch.optim.Optimizer:
    """The run's optimizer; torch's fused SGD knows no DTensor, which is what FSDP makes of parameters."""
    if not _fsdp_modules(core) or job.optimizer.factory is not torch.optim.SGD:
        return job.make_optimizer(core)
    defaults = {k: v for k, v in job.optimizer.defaults.items() if k != "fused"}
    return torch.optim.SGD(job.optimizer_groups(core), **defaults, foreach=True)


def _use_final_buckets(module: DistributedDataParallel) -> None:
    """Give DDP its final buckets before the first step instead of after it.

    Sums in buckets of another order round differently, so at three and more data-parallel ranks a resumed run would
    not be bitwise the uninterrupted one. These names are private to torch; a test of resuming on three ranks fails
    if they go or stop working.
    """
    reducer: Any = module.reducer
    reducer._push_all_rebuilt_params()  # noqa: SLF001
    reducer._rebuild_buckets()  # noqa: SLF001


@contextmanager
def _micro_batch(prepared: Prepared, micro: MicroBatch) -> Iterator[None]:
    engine: _Engine = prepared.engine
    if engine.masks is not None:
        engine.masks.renew()
    with _data_parallel_sync(prepared.module, sync=micro.sync):
        yield
    if engine.buffers is not None:
        engine.buffers.due = micro.sync
    if micro.sync and micro.index == micro.count - 1:
        _sum_partial(engine)
        if engine.common is not None:
            engine.common.compare_gradients()


@contextmanager
def _data_parallel_sync(module: Any, *, sync: bool) -> Iterator[None]:
    if isinstance(module, DistributedDataParallel):
        if sync:
            yield
        else:
            with module.no_sync():
                yield
    elif hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(sync)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
    else:
        yield


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
