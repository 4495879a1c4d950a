"""DistributedDataParallel for strategies: over any ranks, around a whole model or a part of one.

The one place of this project that makes a DistributedDataParallel. Strategies `ddp` and `tp` use it, and any plugin
that declares its dependency on mtb-ddp may.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from mtb_core import BufferSync, ConfigError, MicroBatch, MissingGradient, Shards, broadcast_buffers


@attrs.frozen
class ReplicatedModule:
    """A module that every rank of a group holds as a whole. Made by `wrap_ddp`.

    ``ReplicatedModule(core)`` is a module on one rank, which nothing wraps. So a strategy needs no branch for it.

    Attributes:
        module: what is called on a micro-batch.
        ranks: how many hold it.
        buffer_group: ranks to which `settle` gives the buffers of their first one; None: there is one only.
        buffers: does the same before forwards, where DDP itself does not.
    """

    module: nn.Module
    ranks: int = 1
    buffer_group: dist.ProcessGroup | None = None
    buffers: BufferSync | None = None

    @property
    def loss_factor(self) -> int:
        """Factor of the loss before backward: DDP averages gradients over ranks, and the step needs their sum."""
        return self.ranks

    @contextmanager
    def micro_batch(self, micro: MicroBatch) -> Iterator[None]:
        """The sync context around forward and backward. DDP reads the flag in forward and acts on it in backward.

        Raises:
            MissingGradient: DDP has left a gradient unreduced, on this rank.
        """
        module = self.module
        wrapped = isinstance(module, DistributedDataParallel)
        with module.no_sync() if wrapped and not micro.sync else nullcontext():  # type: ignore[operator]
            yield
        if wrapped and micro.sync:
            _check_reduced(module, micro)  # type: ignore[arg-type]
        if self.buffers is not None:
            self.buffers.due = micro.sync

    def gradients(self, parameters: Iterable[nn.Parameter], copies: int = 1) -> list[Shards]:
        """The gradients of `parameters` that have one.

        Args:
            copies: how many groups of ranks hold these parameters, each as a whole.
        """
        return [Shards([p.grad for p in parameters if p.grad is not None], copies=self.ranks * copies)]

    def settle(self) -> None:
        """Bring the module to what a checkpoint holds: the buffers of the first rank. Called by all ranks."""
        if self.buffer_group is not None:
            broadcast_buffers(self.module.buffers(), self.buffer_group)


def wrap_ddp(
    core: nn.Module,
    ranks: DeviceMesh | dist.ProcessGroup,
    *,
    bucket_cap_mb: int | None = None,
    gradient_as_bucket_view: bool = True,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    comm_hook: str = "none",
    powersgd_rank: int = 2,
    buffers: dist.ProcessGroup | None = None,
    ignored: Iterable[nn.Parameter] = (),
) -> ReplicatedModule:
    """Wrap `core`, whose parameters are plain tensors, in DistributedDataParallel over `ranks`. Called by all of them.

    Every rank has its final buckets at once, in the order in which backward reaches the layers of most models. So the
    first step adds up in the same order as all others, and a run that is resumed stays bitwise.

    Args:
        core: the model, or the part of it that these ranks hold, filled and on its device; some parameter must be
            trainable.
        ranks: one axis of ``job.ctx.mesh``, a mesh that has all ranks of the run, or any group.
        bucket_cap_mb: size of a gradient bucket, MiB. None: torch's sizes, 1 for the first bucket and 25 for others.
        gradient_as_bucket_view: whether gradients live in the buckets.
        static_graph: each step uses the same parameters; every micro-batch must then be synchronised.
        find_unused_parameters: search each graph for parameters that are not used. Buckets are then those of torch
            in the order of registration.
        comm_hook: what compresses gradients on the wire: ``"none"``, ``"fp16"``, ``"bf16"`` or ``"powersgd"``.
        powersgd_rank: of the approximation.
        buffers: ranks whose buffers are those of their first one. None: `ranks`.
        ignored: parameters of `core` that DDP is to leave alone: other ranks have other ones, or share them otherwise.

    Raises:
        ConfigError: a buffer of `core` is one that DDP cannot write to.
        ValueError: `ranks` is a mesh of several axes that has some of the ranks only.
    """
    _check_buffers(core)
    left_alone = {id(p) for p in ignored}
    named = core.named_parameters(remove_duplicate=False)  # a tied one must be named at each of its places
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # noqa: SLF001  (the only way there is)
        core, [name for name, p in named if id(p) in left_alone]
    )
    group = _group_of(ranks)
    own_buffers = buffers is None or dist.get_process_group_ranks(buffers) == dist.get_process_group_ranks(group)
    device = next(core.parameters()).device
    final = not find_unused_parameters  # which keeps the buckets that it begins with
    module = (_LastFirst if final else DistributedDataParallel)(
        core,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
        forward_sync_buffers=own_buffers,
    )
    _register_comm_hook(module, comm_hook, powersgd_rank, group)
    if final:
        _use_final_buckets(module)
    return ReplicatedModule(
        module,
        group.size(),
        group if own_buffers else buffers,
        None if own_buffers else BufferSync.of(core, buffers),
    )


def _group_of(ranks: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    if not isinstance(ranks, DeviceMesh):
        return ranks
    if ranks.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if ranks.ndim == 1:
        return ranks.get_group()
    msg = (
        f"wrap_ddp got a mesh with the axes {ranks.mesh_dim_names}, which has {ranks.size()} of "
        f"{dist.get_world_size()} ranks, and torch has a group of one axis or of all ranks only. Pass one axis, or make "
        "a group of these ranks, pass that, and destroy it in close."
    )
    raise ValueError(msg)


def _check_buffers(core: nn.Module) -> None:
    """DDP writes rank 0's buffers into those of the others, one element after the other."""
    for name, buffer in core.named_buffers():
        if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            raise ConfigError(
                f"Buffer '{name}' of the model is expanded: several of its elements are one in memory, and "
                "DistributedDataParallel cannot write to it. Register it before expand() and expand it in forward, or "
                "register what contiguous() makes of it."
            )


def _check_reduced(module: DistributedDataParallel, micro: MicroBatch) -> None:
    """See that the backward of a synchronised micro-batch has reduced every gradient that there is.

    DDP reduces a bucket when all of its parameters got a gradient in this backward. A parameter that only an earlier,
    unsynchronised micro-batch used has a gradient and keeps its whole bucket from being reduced; DDP tells that at the
    next forward, after the update. One that nothing has used in the whole step is told by core, of all ranks.
    """
    try:
        module._check_reducer_finalized()  # noqa: SLF001  (its only public sign comes too late)
    except RuntimeError as error:
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if found is None:
            raise
        parameters, _ = module._build_params_for_reducer()  # noqa: SLF001
        unreduced = {id(p): p for p in (parameters[int(index)] for index in found[1].split())}
        last = micro.index + 1 == micro.count
        names = [n for n, p in module.module.named_parameters() if id(p) in unreduced and not (last and p.grad is None)]
        if names:
            raise MissingGradient(
                f"Micro-batch {micro.index + 1} of {micro.count} did not use {', '.join(map(repr, names[:3]))}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''} in its loss, so DistributedDataParallel did not "
                "sum their gradients over the ranks. Set find_unused_parameters=true if the strategy has that option, "
                "let every micro-batch use them, or take fsdp with unused_parameters=true."
            ) from error


_WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _register_comm_hook(module: DistributedDataParallel, kind: str, rank: int, group: dist.ProcessGroup) -> None:
    if kind in _WIRE_DTYPES:
        # DDP compares annotations with classes; here they are text, so it gets a function without any.
        dtype = _WIRE_DTYPES[kind]
        module.register_comm_hook(None, lambda _, bucket: _reduce_compressed(dtype, group, bucket))
    elif kind == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # noqa: PLC0415  (only where used)

        state = powerSGD_hook.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,  # the first that torch allows
        )
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _reduce_compressed(
    dtype: torch.dtype, group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over ranks in `dtype`, as torch's own hooks do; its bf16 hook refuses to work without NCCL."""
    gradients = bucket.buffer()
    compressed = gradients.to(dtype).div_(group.size())
    reduced = dist.all_reduce(compressed, group=group, async_op=True).get_future()

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
