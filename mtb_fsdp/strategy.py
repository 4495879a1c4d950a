"""Strategy ``fsdp``: FSDP2's ``fully_shard``. No rank holds the whole model, its gradients or its optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn

from mtb_core import Job, MicroBatch, Prepared, Shards, State, Strategy
from mtb_fsdp.plugin import FSDPOptions
from mtb_fsdp.wrapping import ShardedModule, sharded_optimizer, wrap_fsdp


class FSDPStrategy(Strategy):
    """Fully sharded data parallel; the engine of what it prepares is a `ShardedModule`."""

    def prepare(self, job: Job) -> Prepared:
        """Shard the module while it is on ``meta``, then fill the shards; a model without `init` is built whole."""
        options: FSDPOptions = job.options
        assert job.ctx.mesh is not None
        dtype = job.config.precision if options.param_dtype == "auto" else options.param_dtype
        module = job.in_place(job.build(), autocast=dtype != job.config.precision)
        sharded = wrap_fsdp(
            module,
            job.ctx.mesh,
            job.ctx,
            blocks=job.model.blocks,
            wrap=options.wrap,
            wrap_size=options.wrap_size,
            reshard=options.reshard,
            param_dtype=dtype,
            reduce_dtype=options.reduce_dtype,
            offload=options.cpu_offload,
            prefetch=options.prefetch,
            unused_parameters=options.unused_parameters,
        )
        job.materialize(module)
        if options.cpu_offload:
            _move_to_host(module, job.ctx.device)
        return Prepared(module, module, sharded_optimizer(job, module), sharded)

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """FSDP's flag whether gradients are synchronised."""
        sharded: ShardedModule = prepared.engine
        return sharded.micro_batch(micro)

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """Shards, of which each copy of the model has the same, and whole gradients, the same on every rank."""
        sharded: ShardedModule = prepared.engine
        return sharded.gradients(prepared.trainable)

    def state(self, prepared: Prepared) -> State:
        """Shards, in global coordinates. Buffers are those of rank 0."""
        sharded: ShardedModule = prepared.engine
        sharded.settle()
        return super().state(prepared)

    def close(self, prepared: Prepared) -> None:
        """Destroy the groups that torch made for resharding."""
        sharded: ShardedModule = prepared.engine
        sharded.close()


def _move_to_host(module: nn.Module, device: str) -> None:
    """Parameters to the host, where FSDP wants them when they are offloaded; buffers stay with the computation."""
    module.cpu()
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
