"""All that this plugin reads and writes of DeepSpeed's private parts, in one place; see `requirements.VERSION`.

A ZeRO optimizer keeps, on each rank, flat fp32 tensors that hold this rank's ranges of the parameters one behind the
other, each flat tensor being one parameter of torch's optimizer. `ZeroParts` shows them in terms of the model's
parameters; how they are cut differs between stages 1 and 2 on the one hand and 3 on the other.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import torch
from torch import nn


@attrs.frozen
class Fragment:
    """Elements ``[start, start + numel)`` of a trainable parameter, which this rank keeps and updates in fp32.

    Attributes:
        shape: of the whole parameter.
        flat: the flat tensor that holds them, from `offset` on; the key of torch's optimizer state.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    flat: torch.Tensor
    offset: int
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements of this fragment in `flat`, which is laid out like ``self.flat``; a live view."""
        return flat.detach().narrow(0, self.offset, self.numel)


class ZeroParts:
    """Tensors of a ZeRO optimizer on this rank."""

    def __init__(self, engine: Any, rank: int) -> None:
        self._engine, self._zero, self._rank = engine, engine.optimizer, rank
        self._names = {id(parameter): name for name, parameter in engine.module.named_parameters()}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Torch's optimizer inside."""
        inner: torch.optim.Optimizer = self._zero.optimizer
        return inner

    def fragments(self) -> Iterator[Fragment]:
        """This rank's ranges, none of them empty."""
        raise NotImplementedError

    def flats(self) -> list[tuple[int, torch.Tensor]]:
        """The flat tensors, each with the index of its parameter group."""
        raise NotImplementedError

    def frozen(self) -> Iterator[tuple[str, tuple[int, ...], int, torch.Tensor]]:
        """Parameters that are not trained: name, shape, and what this rank holds of them, from which element on."""
        for name, parameter in self._engine.module.named_parameters():
            if not parameter.requires_grad:
                yield name, *self._held(parameter)

    def _held(self, parameter: nn.Parameter) -> tuple[tuple[int, ...], int, torch.Tensor]:
        return tuple(parameter.shape), 0, parameter.detach().view(-1)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Tensors that this rank keeps now, by purpose (``parameters``, ``gradients``, ``optimizer``), without buckets."""
        flats = [flat for _, flat in self.flats()]
        states = [v for flat in flats for v in self.optimizer.state.get(flat, {}).values() if torch.is_tensor(v)]
        return {
            "parameters": [tensor.detach() for tensor in self._weights()],
            "gradients": [*self._gradients_held(), *(flat.grad for flat in flats if flat.grad is not None)],
            "optimizer": [*(flat.detach() for flat in flats), *states],
        }

    def _weights(self) -> list[torch.Tensor]:
        return list(self._engine.module.parameters())

    def _gradients_held(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def gradients(self) -> list[torch.Tensor]:
        """This rank's reduced gradients in fp32: live, so that scaling them scales what the optimizer will use."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all gradients, reduced or not, as if the step had not begun."""
        raise NotImplementedError

    def publish(self) -> None:
        """The flat tensors have changed: bring the model's parameters into agreement, on all ranks together."""
        raise NotImplementedError

    def _averaged(self, group: int) -> list[torch.Tensor]:
        """The engine's gradients of a group, to be scaled in place; low precision is widened, once, into one tensor."""
        parts = self._zero.averaged_gradients[group]
        if all(part.dtype == torch.float32 for part in parts):
            return list(parts)
        widened = [torch.cat([part.detach().reshape(-1).float() for part in parts])]
        self._zero.averaged_gradients[group] = widened
        return widened


class PartsOfStage12(ZeroParts):
    """All parameters of a group lie one behind the other in one range, which is cut into equal parts, padded."""

    def fragments(self) -> Iterator[Fragment]:
        """See `ZeroParts`."""
        for group, parameters in enumerate(self._zero.bit16_groups):
            flat = self._zero.single_partition_of_fp32_groups[group]
            begin, position = self._rank * flat.numel(), 0
            for parameter in parameters:
                numel = parameter.numel()
                low, high = max(position, begin), min(position + numel, begin + flat.numel())
                if low < high:
                    name, shape = self._names[id(parameter)], tuple(parameter.shape)
                    yield Fragment(name, shape, low - position, flat, low - begin, high - low)
                position += numel

    def flats(self) -> list[tuple[int, torch.Tensor]]:
        """See `ZeroParts`."""
        return list(enumerate(self._zero.single_partition_of_fp32_groups))

    def _gradients_held(self) -> list[torch.Tensor]:
        zero = self._zero
        kept = [*zero.averaged_gradients.values(), *zero.all_grad_tensors.values()]
        whole = [parameter.grad for parameter in self._weights() if parameter.grad is not None]
        return [*whole, *(tensor for part in kept if part is not None for tensor in part)]

    def gradients(self) -> list[torch.Tensor]:
        """See `ZeroParts`."""
        zero, out = self._zero, []
        if zero.cpu_offload:
            return [flat.grad for flat in zero.single_partition_of_fp32_groups]
        for group in range(len(zero.bit16_groups)):
            parts = zero.averaged_gradients[group]
            whole = getattr(parts, "flat_partition", None)
            if whole is not None:
                out.append(whole)
                continue
            out += self._averaged(group)
        return out

    def clear(self) -> None:
        """See `ZeroParts`."""
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
        for group in range(len(zero.bit16_groups)):
            zero.averaged_gradients[group] = None
            zero.all_grad_tensors[group] = None
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
        zero._release_ipg_buffers()  # noqa: SLF001
        zero.micro_step_id = -1

    def publish(self) -> None:
        """See `ZeroParts`."""
        self._zero.update_lp_params()


class PartsOfStage3(ZeroParts):
    """Each parameter is cut into equal parts, padded; the parts of a group lie one behind the other."""

    def fragments(self) -> Iterator[Fragment]:
        """See `ZeroParts`."""
        for group, parameters in enumerate(self._zero.fp16_groups):
            offset, flat = 0, self._zero.fp32_partitioned_groups_flat[group]
            for parameter in parameters:
                start, numel = self._range(parameter)
                if numel:
                    yield Fragment(self._names[id(parameter)], tuple(parameter.ds_shape), start, flat, offset, numel)
                offset += parameter.partition_numel()

    def flats(self) -> list[tuple[int, torch.Tensor]]:
        """See `ZeroParts`."""
        zero = self._zero
        return [(zero.sub_group_to_group_id[i], flat) for i, flat in enumerate(zero.fp32_partitioned_groups_flat)]

    def _range(self, parameter: Any) -> tuple[int, int]:
        """First element and number of elements of this rank's part, without padding."""
        start = self._rank * parameter.partition_numel()
        return start, max(0, min(parameter.partition_numel(), parameter.ds_numel - start))

    def _held(self, parameter: Any) -> tuple[tuple[int, ...], int, torch.Tensor]:
        start, numel = self._range(parameter)
        return tuple(parameter.ds_shape), start if numel else 0, parameter.ds_tensor.detach().narrow(0, 0, numel)

    def _weights(self) -> list[torch.Tensor]:
        parameters: list[Any] = list(self._engine.module.parameters())
        return [*parameters, *(parameter.ds_tensor for parameter in parameters)]

    def _gradients_held(self) -> list[torch.Tensor]:
        return [self._zero.grad_partitions_flat_buffer]

    def gradients(self) -> list[torch.Tensor]:
        """See `ZeroParts`."""
        zero, out = self._zero, []
        if zero.offload_optimizer:
            return [flat.grad for flat in zero.fp32_partitioned_groups_flat]
        for group in range(len(zero.fp16_groups)):
            out += self._averaged(group)
        return out

    def clear(self) -> None:
        """See `ZeroParts`."""
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()
        zero.averaged_gradients = {}
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        for key in zero.params_already_reduced:
            zero.params_already_reduced[key] = False

    def publish(self) -> None:
        """See `ZeroParts`."""
        zero = self._zero
        zero._partition_all_parameters()  # noqa: SLF001  (those that stay gathered hold old values)
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)  # noqa: SLF001
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def zero_parts(engine: Any, stage: int, rank: int) -> ZeroParts | None:
    """The parts of the engine's ZeRO optimizer; None at stage 0, where parameters and optimizer are plain."""
    if not stage:
        return None
    return (PartsOfStage3 if stage == 3 else PartsOfStage12)(engine, rank)


def partition(parameters: Iterable[nn.Parameter], init: Any) -> None:
    """Cut whole parameters for stage 3, as ``deepspeed.zero.Init`` does, but without broadcasting: all ranks have them.

    `init` is a ``deepspeed.zero.Init`` that is not entered.
    """
    for parameter in parameters:
        init._convert_to_deepspeed_param(parameter)  # noqa: SLF001
        parameter.partition()  # type: ignore[attr-defined]


@contextlib.contextmanager
def no_default_group() -> Iterator[None]:
    """Hide the default process group from modules that are imported inside.

    Some of torch's own, which DeepSpeed imports, take it as the default of an argument and so keep it, with its
    threads and sockets, for as long as the process lives.
    """
    world = torch.distributed.distributed_c10d._world  # noqa: SLF001
    held, world.default_pg = world.default_pg, None
    try:
        yield
    finally:
        world.default_pg = held


@contextlib.contextmanager
def without_broadcast(deepspeed: Any) -> Iterator[None]:
    """Engines made inside do not broadcast the model: all ranks have the same, and scalars would make it fail."""
    engine = deepspeed.DeepSpeedEngine
    before = engine._broadcast_model  # noqa: SLF001
    engine._broadcast_model = lambda _: None  # noqa: SLF001
    try:
        yield
    finally:
        engine._broadcast_model = before  # noqa: SLF001


def lend_group(deepspeed: Any) -> None:
    """Let DeepSpeed work on the default process group itself; by its own it would make a second one like it."""
    deepspeed.utils.groups._WORLD_GROUP = torch.distributed.group.WORLD  # noqa: SLF001


def take_back_group(deepspeed: Any) -> None:
    """DeepSpeed keeps groups in globals; one that outlives its run hangs whoever forks and then lets go of it."""
    deepspeed.utils.groups._WORLD_GROUP = None  # noqa: SLF001
    deepspeed.comm.comm.cdb = None
    # Stage 3 leaves its model on a stack and in caches of methods, and with it its parameters' groups.
    zero = deepspeed.runtime.zero
    zero.parameter_offload.FWD_MODULE_STACK.clear()
    for function in vars(zero.partitioned_param_coordinator.PartitionedParameterCoordinator).values():
        for cell in getattr(function, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


def count_devices_once(accelerator: Any) -> None:
    """On CPU each question for the number of devices starts a subprocess, and every reduction of stage 3 asks."""
    if not hasattr(accelerator.device_count, "cache_info"):
        accelerator.device_count = functools.cache(accelerator.device_count)


def import_muon_plainly() -> None:
    """Import DeepSpeed's Muon, which its engine does to see that the optimizer is another one, without its compiling.

    Some of its functions are under ``torch.compile``, and to decorate them imports all of torch's compiler: seconds.
    """
    compiling = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        torch.compile = compiling


def without_ops(deepspeed: Any) -> None:
    """Say in advance that none of DeepSpeed's ops can be built here.

    By its own it would ask a compiler when it is first used, leave a file open, and then build its shared-memory
    all-reduce, which serves inference only.
    """
    deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)
