"""Strategy ``ddp``: every rank holds the model; gradients are summed over ranks in buckets while backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import attrs
import torch

from mtb_core import Job, MicroBatch, Prepared, Shards, State, Strategy
from mtb_ddp.plugin import DDPOptions
from mtb_ddp.wrapping import ReplicatedModule, wrap_ddp
from mtb_ddp.zero1 import make_zero1, zero1_state


@attrs.frozen
class _Engine:
    replicas: ReplicatedModule
    zero1: bool


class DDPStrategy(Strategy):
    """DistributedDataParallel, with communication hooks and ZeroRedundancyOptimizer as options."""

    def prepare(self, job: Job) -> Prepared:
        """Wrap the model; the optimizer works on the bare parameters."""
        options: DDPOptions = job.options
        assert job.ctx.mesh is not None
        core = job.in_place(job.materialize(job.build()))
        optimizer = make_zero1(job, core) if options.zero1 else job.make_optimizer(core)
        replicas = wrap_ddp(
            core,
            job.ctx.mesh,
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
            comm_hook=options.comm_hook,
            powersgd_rank=options.powersgd_rank,
        )
        return Prepared(replicas.module, core, optimizer, _Engine(replicas, options.zero1))

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """DDP's ``no_sync``, where gradients are not to be synchronised."""
        engine: _Engine = prepared.engine
        return engine.replicas.micro_batch(micro)

    def backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """DDP averages over ranks; the contract is their sum."""
        (loss * prepared.engine.replicas.loss_factor).backward()

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """All gradients, the same on every rank."""
        engine: _Engine = prepared.engine
        return engine.replicas.gradients(prepared.trainable)

    def state(self, prepared: Prepared) -> State:
        """With ZeRO-1 each rank gives the optimizer state of its own share. Buffers are those of rank 0.

        DDP gives every rank the buffers of rank 0 at the next forward; here it is done before they are saved, so that
        a checkpoint holds one model.
        """
        engine: _Engine = prepared.engine
        engine.replicas.settle()
        return zero1_state(prepared) if engine.zero1 else super().state(prepared)
