"""FSDP2 for strategies: ``fully_shard`` over any mesh, around a whole model or a part of one.

The one place of this project that calls ``fully_shard``. Strategies `fsdp` and `tp` use it, and any plugin that
declares its dependency on mtb-fsdp may.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mtb_core import BufferSync, Job, MicroBatch, RankContext, RunFailed, Shards, broadcast_buffers
from mtb_fsdp.replicated import sum_gradients
from mtb_fsdp.units import check_dtypes, choose_units, without_views
from mtb_fsdp.unused import UsageCheck

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}

#: What torch's error about a parameter that was not gathered means here.
_USED_OUTSIDE = (
    "Forward met a sharded parameter that was not gathered ({}). Most likely the parameter of a block is used outside "
    "of the block's own call, such as by block.forward(x) or through block.layer.weight: only a call, block(x), gathers "
    "it. Call the block, or use --strategy fsdp --strategy-opt wrap=root, which gathers the model as a whole."
)


@attrs.define
class ShardedModule:
    """A module whose parameters, and so their gradients and optimizer state, are split over ranks. Made by `wrap_fsdp`.

    Attributes:
        module: what is called on a micro-batch.
        ranks: how many hold it together.
        copies: how many of them hold the same shard.
        loss_factor: what the loss is multiplied by before backward: nothing, for gradients are summed over ranks.
    """

    loss_factor: ClassVar[int] = 1
    module: nn.Module
    ranks: int
    copies: int
    _groups: tuple[dist.ProcessGroup, ...]
    _buffer_groups: tuple[dist.ProcessGroup, ...]
    _buffers: tuple[BufferSync, ...]
    _scalars: frozenset[str]
    _waiting: bool = False

    @contextmanager
    def micro_batch(self, micro: MicroBatch) -> Iterator[None]:
        """The sync context around forward and backward. FSDP reads the flag in backward.

        An exception inside, or a step that ended without synchronising, leaves no gradients behind for the next step.
        At the end of a step the gradients of parameters that are not sharded are summed.

        Raises:
            RunFailed: forward used a parameter that was not gathered.
        """
        module: Any = self.module
        if self._waiting and micro.index == 0:
            _drop_unfinished(module)
        self._waiting = not micro.sync
        if not micro.sync:  # setting the flag walks all modules, and true is what it always is outside
            module.set_requires_gradient_sync(False)
        try:
            yield
        except BaseException as error:
            _drop_unfinished(module)
            if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
                raise RunFailed(_USED_OUTSIDE.format(error)) from error
            raise
        finally:
            if not micro.sync:
                module.set_requires_gradient_sync(True)
        for buffers in self._buffers:
            buffers.due = micro.sync
        if micro.sync and micro.index == micro.count - 1 and self._groups and self._whole:
            sum_gradients(self._whole, self._groups)

    def gradients(self, parameters: Iterable[nn.Parameter], copies: int = 1) -> list[Shards]:
        """The gradients of `parameters` that have one: first the shards, then those of parameters that are whole.

        Args:
            copies: how many meshes hold these parameters, each all of them.
        """
        local, whole = [], []
        with torch.no_grad():
            for parameter in parameters:
                gradient: Any = parameter.grad
                if gradient is not None:
                    if parameter.dim():
                        local.append(gradient.to_local())
                    else:
                        whole.append(gradient)
        return [Shards(local, self.copies * copies), Shards(whole, self.ranks * copies)]

    def settle(self) -> None:
        """Bring the module to what a checkpoint holds: shards, and the buffers of the first rank. Called by all ranks."""
        _reshard(self.module)
        for group in self._buffer_groups:
            broadcast_buffers(self.module.buffers(), group)

    @functools.cached_property
    def _whole(self) -> tuple[nn.Parameter, ...]:
        """Trainable parameters that are not sharded; listed when they are filled, for that may replace them."""
        return tuple(p for name, p in self.module.named_parameters() if name in self._scalars and p.requires_grad)

    def close(self) -> None:
        """Destroy the groups that torch makes for units that stay gathered in part after forward."""
        for mesh in _partial_meshes(self.module):
            for group in mesh.get_all_groups():
                dist.destroy_process_group(group)


def wrap_fsdp(
    module: nn.Module,
    mesh: DeviceMesh,
    ctx: RankContext,
    *,
    blocks: Sequence[str],
    wrap: str = "block",
    wrap_size: int = 0,
    reshard: bool | int = True,
    param_dtype: str = "fp32",
    reduce_dtype: str = "fp32",
    offload: bool = False,
    prefetch: int = 0,
    unused_parameters: bool = False,
    buffers: dist.ProcessGroup | None = None,
    ignored: Collection[nn.Parameter] = (),
) -> ShardedModule:
    """Shard `module` in place over `mesh`, its parameters on ``meta`` or filled. Called by all ranks of the mesh.

    Gradients are summed over ranks. A parameter without dimensions stays whole on every rank. Ranks that do not run the
    same units, or do not use the same parameters, end with an error that says which.

    Args:
        module: the model, or the part of it that these ranks hold, its parameters plain tensors.
        mesh: one axis of ``job.ctx.mesh``; or two, of which the outer one has copies of the sharded module.
        blocks: names of the blocks in `module`.
        wrap: what is gathered together, as option `wrap` of strategy `fsdp` has it; `wrap_size` likewise.
        reshard: whether a unit's gathered parameters are freed after its forward; a number: they stay spread over so
            many ranks. `ShardedModule.close` must then be called at the end.
        param_dtype: in which parameters are gathered and computed with, ``"fp32"`` or ``"bf16"``. With the latter
            `module` must not be under autocast, which would cast once more. Shards keep their dtype.
        reduce_dtype: in which gradients are summed.
        offload: shards live in host memory; the caller moves `module` there once it is filled.
        prefetch: units that are gathered ahead; 0: as torch does by itself.
        unused_parameters: whether a parameter that a rank does not use counts as zero there.
        buffers: ranks whose buffers are those of their first one. None: those of `mesh`.
        ignored: parameters of `module` that are left alone: other ranks have other ones, or they are sharded already.

    Raises:
        ConfigError: trainable parameters that are sharded together have several dtypes.
    """
    units = choose_units(module, blocks, wrap, wrap_size)
    check_dtypes(module, units, ignored)
    copies = mesh.size(0) if mesh.ndim > 1 else 1
    check = UsageCheck(module, units, mesh.size() // copies, _among(ctx, mesh), ignored)
    left_alone = {id(p) for p in ignored}
    scalars = {name: p for name, p in module.named_parameters() if not p.dim() and id(p) not in left_alone}
    shared: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(_DTYPES[param_dtype], _reduce_dtype(param_dtype, reduce_dtype)),
        "offload_policy": CPUOffloadPolicy(pin_memory=ctx.device != "cpu") if offload else OffloadPolicy(),
        "ignored_params": {*scalars.values(), *ignored},
    }
    for name in units:
        unit = module.get_submodule(name)
        unit.register_forward_hook(without_views)  # before FSDP's own hook
        fully_shard(unit, reshard_after_forward=reshard, **shared)
        check.watch(name, unit)
    # The root's backward begins when its forward has ended: freeing its parameters in between would gain nothing.
    fully_shard(module, reshard_after_forward=False, **shared)
    for part in _fsdp_modules(module):
        # The contract is the sum over ranks; summing is also what every backend can do.
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
        part.set_reduce_scatter_unused_params(unused_parameters, recurse=False)
    for name, reduce_scatter in check.reduce_scatters.items():
        sharded: Any = module.get_submodule(name)
        sharded.set_custom_reduce_scatter(reduce_scatter)
    _set_prefetch([module.get_submodule(name) for name in units], module, prefetch)
    module.register_forward_hook(_reshard_if_no_backward_follows)
    # It warns that an operation in place on the model's output would be wrong; nobody does one.
    warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({type(module).__name__}\) returned a view")
    groups = _groups_of(mesh)
    buffer_groups = groups if buffers is None else (buffers,)
    return ShardedModule(
        module,
        mesh.size(),
        copies,
        groups,
        buffer_groups if next(module.buffers(), None) is not None else (),
        tuple(sync for group in buffer_groups if (sync := BufferSync.of(module, group)) is not None),
        frozenset(scalars),
    )


def sharded_optimizer(job: Job, core: nn.Module) -> torch.optim.Optimizer:
    """The run's optimizer over `core`, sharded or not: torch has no fused SGD for shards, they get its ``foreach`` one."""
    recipe = job.optimizer
    fused = recipe.factory is torch.optim.SGD and recipe.defaults.get("fused")
    if not fused or not any(isinstance(p, DTensor) for p in core.parameters()):
        return job.make_optimizer(core)
    return recipe.factory(job.optimizer_groups(core), **{**recipe.defaults, "fused": False, "foreach": True})


def _groups_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, ...]:
    """Groups whose collectives, one after the other, reach all ranks of `mesh`; none for a mesh of one rank."""
    if mesh.size() == 1:
        return ()
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return (dist.group.WORLD,)
    return tuple(mesh.get_all_groups())


def _among(ctx: RankContext, mesh: DeviceMesh) -> RankContext:
    """`ctx` for what the ranks of `mesh` ask each other: others hold other parts of the model and have no answer."""
    if mesh.size() == ctx.world_size or ctx.store is None:
        return ctx
    ranks = ",".join(map(str, mesh.mesh.flatten().tolist()))
    store = dist.PrefixStore(f"mtb/fsdp/{ranks}", ctx.store)
    return attrs.evolve(ctx, world=attrs.evolve(ctx.world, size=mesh.size()), store=store)


def _reduce_dtype(param_dtype: str, reduce_dtype: str) -> torch.dtype | None:
    """None, which stands for the gradients' own dtype, wherever it is the same: FSDP then spares a copy."""
    return None if param_dtype == reduce_dtype else getattr(torch, {"fp32": "float32"}.get(reduce_dtype, "bfloat16"))


def _set_prefetch(units: Sequence[Any], root: Any, depth: int) -> None:
    """Let each unit gather the next `depth` ones in forward and the `depth` ones before it in backward."""
    if not depth:
        return
    root.set_modules_to_forward_prefetch(list(units[:depth]))
    root.set_modules_to_backward_prefetch(list(reversed(units[-depth:])))
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, index - depth) : index])))


def _drop_unfinished(module: Any) -> None:
    """Bring FSDP back to where it is between steps, without the gradients that were not synchronised yet.

    FSDP's own reset does not drop those. The names used for it are private to torch; the tests of exceptions fail if
    they go.
    """
    if module._get_fsdp_state()._is_root is None:  # noqa: SLF001
        return  # nothing was called yet, so nothing is unfinished
    module.reset_iter_state()
    for part in _fsdp_modules(module):
        for group in part._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None


def _reshard_if_no_backward_follows(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001  (a hook)
    """Backward is what reshards the root; after evaluation its parameters would stay gathered, and be seen so."""
    if not torch.is_grad_enabled():
        _reshard(module)


def _reshard(module: nn.Module) -> None:
    for part in _fsdp_modules(module):
        part.reshard()


def _partial_meshes(module: nn.Module) -> Iterator[DeviceMesh]:
    """Meshes of units that are resharded over fewer ranks than they are sharded over."""
    for part in _fsdp_modules(module):
        for group in part._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
            after = group.post_forward_mesh_info
            if after is not None and after is not group.mesh_info:
                yield after.mesh


def _fsdp_modules(module: nn.Module) -> Iterator[Any]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))
