"""Strategy ``fsdp``: FSDP2's ``fully_shard``. No rank holds the whole model, its gradients or its optimizer state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from mtb_core import BufferSync, Job, MicroBatch, Prepared, RunFailed, Shards, State, Strategy, broadcast_buffers
from mtb_fsdp.plugin import FSDPOptions
from mtb_fsdp.replicated import sum_gradients
from mtb_fsdp.units import check_dtypes, choose_units, without_views
from mtb_fsdp.unused import UsageCheck

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}

#: What torch's error about a parameter that was not gathered means here.
_USED_OUTSIDE = (
    "Forward met a sharded parameter that was not gathered ({}). Most likely the parameter of a block is used outside "
    "of the block's own call, such as by block.forward(x) or through block.layer.weight: only a call, block(x), gathers "
    "it. Call the block, or gather the model as a whole with --strategy-opt wrap=root."
)


@attrs.frozen
class _Engine:
    """What the strategy keeps beside the module.

    Attributes:
        ranks: all of them.
        copies: how many ranks hold the same shard.
        sharded, replicated: the trainable parameters of either kind.
        buffers: brings them into agreement; None where the model has none.
    """

    ranks: int
    copies: int
    sharded: tuple[nn.Parameter, ...]
    replicated: tuple[nn.Parameter, ...]
    buffers: BufferSync | None


class FSDPStrategy(Strategy):
    """Fully sharded data parallel."""

    def prepare(self, job: Job) -> Prepared:
        """Shard the module while it is on ``meta``, then fill the shards; a model without `init` is built whole."""
        options: FSDPOptions = job.options
        dtype = job.config.precision if options.param_dtype == "auto" else options.param_dtype
        module = job.in_place(job.build(), autocast=dtype != job.config.precision)
        units = choose_units(module, job.model.blocks, options.wrap, options.wrap_size)
        check_dtypes(module, units)
        _shard(module, units, job, MixedPrecisionPolicy(_DTYPES[dtype], _reduce_dtype(dtype, options.reduce_dtype)))
        _set_prefetch([module.get_submodule(name) for name in units], module, options.prefetch)
        job.materialize(module)
        if options.cpu_offload:
            _move_to_host(module, job.ctx.device)
        buffers = BufferSync.of(module) if job.ctx.world_size > 1 else None
        module.register_forward_hook(_reshard_if_no_backward_follows)
        # It warns that an operation in place on the model's output would be wrong; nobody does one.
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({type(module).__name__}\) returned a view")
        trainable = [p for p in module.parameters() if p.requires_grad]
        engine = _Engine(
            job.ctx.world_size,
            options.hsdp,
            tuple(p for p in trainable if p.dim()),
            tuple(p for p in trainable if not p.dim()),
            buffers,
        )
        return Prepared(module, module, _make_optimizer(job, module), engine)

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """FSDP reads the flag in backward."""
        return _micro_batch(prepared, micro)

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """Shards, of which each copy of the model has the same, and whole gradients, the same on every rank."""
        engine: _Engine = prepared.engine
        with torch.no_grad():
            local = [p.grad.to_local() for p in engine.sharded if p.grad is not None]  # type: ignore[attr-defined]
        whole = [p.grad for p in engine.replicated if p.grad is not None]
        return [Shards(local, copies=engine.copies), Shards(whole, copies=engine.ranks)]

    def optimizer_step(self, prepared: Prepared, apply: bool) -> bool:
        """Where the step is left out, gradients that wait for a synchronisation are dropped too."""
        applied = super().optimizer_step(prepared, apply)
        if not apply:
            _drop_unfinished(prepared.module)
        return applied

    def state(self, prepared: Prepared) -> State:
        """Shards, in global coordinates. Buffers are those of rank 0."""
        _reshard(prepared.module)
        engine: _Engine = prepared.engine
        if engine.buffers is not None:
            broadcast_buffers(prepared.module.buffers())
        return super().state(prepared)

    def close(self, prepared: Prepared) -> None:
        """Destroy the groups that torch makes for each unit that stays gathered in part after forward."""
        for mesh in _partial_meshes(prepared.module):
            for group in mesh.get_all_groups():
                dist.destroy_process_group(group)


def _reduce_dtype(param_dtype: str, reduce_dtype: str) -> torch.dtype | None:
    """None, which stands for the gradients' own dtype, wherever it is the same: FSDP then spares a copy."""
    return None if param_dtype == reduce_dtype else getattr(torch, {"fp32": "float32"}.get(reduce_dtype, "bfloat16"))


def _shard(module: nn.Module, units: Sequence[str], job: Job, precision: MixedPrecisionPolicy) -> None:
    """``fully_shard`` each unit, then what is left. Parameters without dimensions cannot be sharded and stay whole."""
    options: FSDPOptions = job.options
    offload = CPUOffloadPolicy(pin_memory=job.ctx.device != "cpu") if options.cpu_offload else OffloadPolicy()
    shared: dict[str, Any] = {
        "mesh": job.ctx.mesh,
        "mp_policy": precision,
        "offload_policy": offload,
        "ignored_params": {p for p in module.parameters() if not p.dim()},
    }
    check = UsageCheck(module, units, job.ctx.world_size // options.hsdp, job.ctx)
    for name in units:
        unit = module.get_submodule(name)
        unit.register_forward_hook(without_views)  # before FSDP's own hook
        fully_shard(unit, reshard_after_forward=options.reshard, **shared)
    # The root's backward begins when its forward has ended: freeing its parameters in between would gain nothing.
    fully_shard(module, reshard_after_forward=False, **shared)
    for part in _fsdp_modules(module):
        # The contract is the sum over ranks; summing is also what every backend can do.
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
        part.set_reduce_scatter_unused_params(options.unused_parameters, recurse=False)
    for name, reduce_scatter in check.reduce_scatters.items():
        sharded: Any = module.get_submodule(name)
        sharded.set_custom_reduce_scatter(reduce_scatter)


def _make_optimizer(job: Job, module: nn.Module) -> torch.optim.Optimizer:
    """The run's optimizer; torch has no fused SGD for sharded parameters, so it gets its ``foreach`` one."""
    recipe = job.optimizer
    if recipe.factory is not torch.optim.SGD or not recipe.defaults.get("fused"):
        return job.make_optimizer(module)
    return recipe.factory(job.optimizer_groups(module), **{**recipe.defaults, "fused": False, "foreach": True})


def _set_prefetch(units: Sequence[Any], root: Any, depth: int) -> None:
    """Let each unit gather the next `depth` ones in forward and the `depth` ones before it in backward."""
    if not depth:
        return
    root.set_modules_to_forward_prefetch(list(units[:depth]))
    root.set_modules_to_backward_prefetch(list(reversed(units[-depth:])))
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, index - depth) : index])))


def _move_to_host(module: nn.Module, device: str) -> None:
    """Parameters to the host, where FSDP wants them when they are offloaded; buffers stay with the computation."""
    module.cpu()
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


@contextmanager
def _micro_batch(prepared: Prepared, micro: MicroBatch) -> Iterator[None]:
    module: Any = prepared.module
    engine: _Engine = prepared.engine
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
    if engine.buffers is not None:
        engine.buffers.due = micro.sync
    if engine.replicated and engine.ranks > 1 and micro.sync and micro.index == micro.count - 1:
        sum_gradients(engine.replicated)


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
