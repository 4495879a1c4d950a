"""Strategy ``ddp``: every rank holds the model; gradients are summed over ranks in buckets while backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mtb_core import ConfigError, Job, MicroBatch, Prepared, Shards, State, Strategy, broadcast_buffers
from mtb_ddp.plugin import DDPOptions
from mtb_ddp.zero1 import make_zero1, zero1_state


@attrs.frozen
class _Engine:
    replicas: int
    zero1: bool


class DDPStrategy(Strategy):
    """DistributedDataParallel, with communication hooks and ZeroRedundancyOptimizer as options."""

    def prepare(self, job: Job) -> Prepared:
        """Wrap the model; the optimizer works on the bare parameters."""
        options: DDPOptions = job.options
        core = job.in_place(job.materialize(job.build()))
        _check_buffers(core)
        optimizer = make_zero1(job, core) if options.zero1 else job.make_optimizer(core)
        device = torch.device(job.ctx.device)
        final = not options.find_unused_parameters  # which keeps the buckets that it begins with
        module = (_LastFirst if final else DistributedDataParallel)(
            core,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
        )
        _register_comm_hook(module, options)
        if final:
            _use_final_buckets(module)
        return Prepared(module, core, optimizer, _Engine(job.ctx.world_size, options.zero1))

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """DDP reads the flag in forward and acts on it in backward, so ``no_sync`` must span both."""
        module: Any = prepared.module
        context: AbstractContextManager[None] = nullcontext() if micro.sync else module.no_sync()
        return context

    def backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """DDP averages over ranks; the contract is their sum."""
        (loss * prepared.engine.replicas).backward()

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """All gradients, the same on every rank."""
        tensors = [p.grad for p in prepared.trainable if p.grad is not None]
        return [Shards(tensors, copies=prepared.engine.replicas)]

    def state(self, prepared: Prepared) -> State:
        """With ZeRO-1 each rank gives the optimizer state of its own share. Buffers are those of rank 0.

        DDP gives every rank the buffers of rank 0 at the next forward; here it is done before they are saved, so that
        a checkpoint holds one model.
        """
        broadcast_buffers(prepared.core.buffers())
        if prepared.engine.zero1:
            return zero1_state(prepared)
        return super().state(prepared)


def _check_buffers(core: torch.nn.Module) -> None:
    """DDP writes rank 0's buffers into those of the others, one element after the other."""
    for name, buffer in core.named_buffers():
        if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            raise ConfigError(
                f"Buffer '{name}' of the model is expanded: several of its elements are one in memory, and "
                "DistributedDataParallel cannot write to it. Register it before expand() and expand it in forward, or "
                "register what contiguous() makes of it."
            )


_WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _register_comm_hook(module: DistributedDataParallel, options: DDPOptions) -> None:
    if options.comm_hook in _WIRE_DTYPES:
        # DDP compares annotations with classes; here they are text, so it gets a function without any.
        module.register_comm_hook(
            _WIRE_DTYPES[options.comm_hook],
            lambda dtype, bucket: _reduce_compressed(dtype, bucket),  # noqa: PLW0108
        )
    elif options.comm_hook == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # noqa: PLC0415  (only where used)

        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=options.powersgd_rank,
            start_powerSGD_iter=2,  # the first that torch allows
        )
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _reduce_compressed(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over ranks in `dtype`, as torch's own hooks do; its bf16 hook refuses to work without NCCL."""
    gradients = bucket.buffer()
    compressed = gradients.to(dtype).div_(dist.get_world_size())
    reduced = dist.all_reduce(compressed, async_op=True).get_future()

    def decompress(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return gradients.copy_(done.value()[0])

    future: torch.futures.Future[torch.Tensor] = reduced.then(decompress)
    return future


class _LastFirst(DistributedDataParallel):
    """Gives its reducer the parameters in the order in which backward is expected to reach them: the last ones first.

    Torch learns that order in the first backward. `_use_final_buckets` does without, and makes buckets in the order
    that the reducer was given; with the order of registration the first bucket would be full when backward ends, and
    nothing would overlap. The name is private to torch; a test of when buckets are reduced fails if it goes.
    """

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]


def _use_final_buckets(module: DistributedDataParallel) -> None:
    """Give DDP its final buckets before the first step instead of after it.

    DDP starts with one order of buckets and rebuilds them, in the order in which gradients came,
    after its first backward. Sums in another order round differently, so at three and more ranks a run that is
    resumed (whose first step is another step) would not be bitwise the uninterrupted one. These names are private
    to torch; the tests of resuming on three ranks fail if they go or stop working.
    """
    reducer: Any = module.reducer
    reducer._push_all_rebuilt_params()  # noqa: SLF001
    reducer._rebuild_buckets()  # noqa: SLF001
