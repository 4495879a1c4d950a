"""Strategy ``fsdp1``: FullyShardedDataParallel, in which a unit's parameters are one flat tensor cut into equal parts.

A rank's part of a parameter is a contiguous range of its elements, and may be empty.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._runtime_utils import _reshard

from mtb_core import (
    BufferSync,
    ConfigError,
    Job,
    MicroBatch,
    Piece,
    Prepared,
    Shards,
    State,
    Strategy,
    broadcast_buffers,
    fragment_pieces,
    module_state,
)
from mtb_fsdp.plugin import FSDP1Options
from mtb_fsdp.skeleton import Names
from mtb_fsdp.units import check_dtypes, choose_units, without_views
from mtb_fsdp.unused import UsageCheck

_SHARDING = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "none": ShardingStrategy.NO_SHARD,
}


@attrs.frozen
class _Fragment:
    """This rank's part of a parameter of `shape`: as many elements as the parameter has here, from `start` on."""

    shape: tuple[int, ...]
    start: int

    def pieces(self, flat: torch.Tensor) -> list[Piece]:
        return fragment_pieces(flat, self.shape, self.start)


@attrs.frozen
class _Engine:
    """The strategy's own values beside the module.

    Attributes:
        copies: how many ranks hold the same elements.
        fragments: of the sharded parameters, by name; empty where nothing is sharded.
        buffers: brings them into agreement; None where the model has none.
    """

    ranks: int
    copies: int
    fragments: Mapping[str, _Fragment]
    buffers: BufferSync | None


class FSDP1Strategy(Strategy):
    """The older fully sharded data parallel."""

    def prepare(self, job: Job) -> Prepared:
        """Fill one unit at a time and shard it at once; a model without `init` is built whole.

        `core` is a skeleton: FSDP's wrappers change names, and the skeleton's are those of the model.
        """
        options: FSDP1Options = job.options
        module = job.in_place(job.build(), autocast=False)
        units = choose_units(module, job.model.blocks, options.wrap, options.wrap_size)
        check_dtypes(module, units)
        _refuse_scalars(module)
        check = UsageCheck(module, units, job.ctx.world_size, job.ctx)
        before, shapes = Names.of(module), {n: tuple(p.shape) for n, p in module.named_parameters()}
        names = {id(p): n for n, p in module.named_parameters()}
        # Before FSDP makes all parameters flat, which does not show how they are to be grouped.
        groups = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in job.optimizer_groups(module)]
        after = before
        root: nn.Module = module
        for name in (*units, ""):
            unit = module.get_submodule(name)
            if name:
                unit.register_forward_hook(without_views)
            own = before.among([*unit.parameters(), *unit.buffers()])
            _fill(job, module, own)
            now = own.now_in(module)
            after = attrs.evolve(
                after,
                parameters={**after.parameters, **now.parameters},
                buffers={**after.buffers, **now.buffers},
            )
            root = _wrap(unit, job)
            if name:
                check.watch(name, root)
            _replace(module, unit, root)
        root.register_forward_hook(_reshard_if_no_backward_follows)
        core: Any = after.skeleton()
        core.forward = module.forward  # for its signature
        flat = dict(core.named_parameters())
        groups = [{**g, "params": [flat[name] for name in g["params"]]} for g in groups]
        starts = _starts(root)
        fragments = {n: _Fragment(shapes[n], starts[id(p)]) for n, p in core.named_parameters() if id(p) in starts}
        ranks = job.ctx.world_size
        buffers = BufferSync.of(root) if ranks > 1 else None
        engine = _Engine(ranks, ranks if not fragments else 1, fragments, buffers)
        return Prepared(root, core, job.optimizer.factory(groups, **job.optimizer.defaults), engine)

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """FSDP reads the flag in backward; it may only be changed outside of forward."""
        return _micro_batch(prepared, micro)

    def backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """FSDP averages over ranks; the contract is their sum."""
        (loss * prepared.engine.ranks).backward()

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """Parts of the gradients. A parameter of which this rank holds nothing gets an empty one.

        Without it the optimizer would not count its steps here, though the count is one for all ranks.
        """
        if prepared.engine.fragments:
            for parameter in _empty_with_gradient(prepared.module):
                parameter.grad = torch.empty_like(parameter)
        tensors = [p.grad for p in prepared.trainable if p.grad is not None]
        return [Shards(tensors, copies=prepared.engine.copies)]

    def state(self, prepared: Prepared) -> State:
        """Fragments as rectangles in global coordinates. Buffers are those of rank 0."""
        engine: _Engine = prepared.engine
        if engine.buffers is not None:
            broadcast_buffers(prepared.core.buffers())
        state = module_state(prepared.core, prepared.optimizer)
        pieces = dict(state.pieces)
        for name, parameter in prepared.core.named_parameters():
            fragment = engine.fragments.get(name)
            if fragment is None:
                continue
            pieces[f"model/{name}"] = fragment.pieces(parameter)
            for key, value in prepared.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():  # the count of steps has no dimensions
                    pieces[f"optim/{name}/{key}"] = fragment.pieces(value)
        return attrs.evolve(state, pieces=pieces)


def _refuse_scalars(module: nn.Module) -> None:
    names = [name for name, parameter in module.named_parameters() if not parameter.dim()]
    if names:
        raise ConfigError(
            f"Parameter '{names[0]}' has no dimensions, and FullyShardedDataParallel cannot shard it; give it the shape "
            "[1], or use strategy 'fsdp', which keeps such a parameter whole."
        )


def _fill(job: Job, module: nn.Module, names: Names) -> None:
    """Materialise the tensors of `names` in `module`, and no others."""
    if any(t.is_meta for t in (*names.parameters.values(), *names.buffers.values())):
        filled = job.materialize(names.skeleton())
        attrs.evolve(
            names,
            parameters=dict(filled.named_parameters(remove_duplicate=False)),
            buffers=dict(filled.named_buffers(remove_duplicate=False)),
        ).put_into(module)


def _wrap(unit: nn.Module, job: Job) -> nn.Module:
    options: FSDP1Options = job.options
    sharding = _SHARDING[options.sharding] if job.ctx.world_size > 1 else ShardingStrategy.NO_SHARD
    precision = None
    if job.config.precision == "bf16":
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with warnings.catch_warnings():
        # That it is deprecated is said where the strategy is listed as legacy.
        warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
        return FullyShardedDataParallel(
            unit,
            sharding_strategy=sharding,
            mixed_precision=precision,
            device_id=torch.device(job.ctx.device),
            use_orig_params=True,
        )


def _replace(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `module` has `old`, which may be in several places."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # noqa: SLF001  (named_children leaves out repeated ones)
            if child is old:
                setattr(parent, name, new)


def _handles(root: nn.Module) -> Iterator[Any]:
    """FSDP's view of each unit: private to torch. The tests of checkpoints fail if it changes."""
    for part in root.modules():
        if isinstance(part, FullyShardedDataParallel) and part._handle is not None:  # noqa: SLF001
            yield part._handle  # noqa: SLF001


def _reshard_if_no_backward_follows(root: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001  (a hook)
    """Backward is what reshards the root; after evaluation its parameters would stay gathered, and be used so."""
    if torch.is_grad_enabled():
        return
    for handle in _handles(root):
        if handle.uses_sharded_strategy and not handle.needs_unshard():
            _reshard(root, handle, True)


def _starts(root: nn.Module) -> dict[int, int]:
    """Index of the first element that this rank holds of each sharded parameter, by the parameter's id."""
    out = {}
    for handle in _handles(root):
        if handle.uses_sharded_strategy:
            flat = handle.flat_param
            for parameter, info in zip(flat._params, flat._shard_param_infos, strict=True):  # noqa: SLF001
                out[id(parameter)] = info.intra_param_start_idx if info.in_shard else 0
    return out


def _empty_with_gradient(root: nn.Module) -> Iterator[nn.Parameter]:
    """Trainable parameters of which this rank holds nothing, in units that have a gradient."""
    for handle in _handles(root):
        flat = handle.flat_param
        if handle.sharded_grad is not None:
            infos = zip(flat._params, flat._shard_param_infos, strict=True)  # noqa: SLF001
            yield from (p for p, info in infos if p.requires_grad and not info.in_shard)


@contextmanager
def _micro_batch(prepared: Prepared, micro: MicroBatch) -> Iterator[None]:
    module: Any = prepared.module
    if micro.sync:
        yield
    else:
        with module.no_sync():
            yield
    if prepared.engine.buffers is not None:
        prepared.engine.buffers.due = micro.sync
