"""The model services that a strategy gets in its `Job`: build, fill the weights, change in place.

Weights depend on (seed, parameter name) only: never on rank, world size, sharding, device or on what other
parameters there are.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from mtb_core.api.errors import ConfigError
from mtb_core.api.options import nearest
from mtb_core.api.state import piece
from mtb_core.api.values import ModelSpec
from mtb_core.config.schema import TrainConfig

from .aside import streams_kept


def build_module(spec: ModelSpec, seed: int, device: str) -> nn.Module:
    """The bare module: on ``meta`` where `spec.init` can fill it, otherwise initialised by itself, on `device`.

    In the second case it is built on the CPU with torch's, numpy's and python's streams seeded with `seed`, so that it
    is the same on every rank and device. The process's own random state is left as it was.

    Raises:
        ConfigError: `spec` names a block, or a module of its chain, that the module does not have.
    """
    if spec.init is not None:
        with torch.device("meta"), _NoInitialisation():
            module = spec.build()
    else:
        with streams_kept():
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002  (the global stream is what a model's code draws from)
            module = spec.build().to(device)
    names = dict(module.named_modules(remove_duplicate=False))
    for field, named in (("blocks", spec.blocks), ("chain", spec.chain)):
        if unknown := [name for name in named if name not in names]:
            raise ConfigError(
                f"ModelSpec.{field} of the model ({type(module).__name__}) names '{unknown[0]}', which is none of its "
                f"modules.{nearest(unknown[0], names)} Use names as Module.named_modules() gives them."
            )
    return module


class _NoInitialisation(TorchFunctionMode):
    """Leaves out `torch.nn.init` while a module is built on ``meta``, where it computes nothing anyway.

    It would not be free: torch's random operators on ``meta`` import sympy, which takes a second.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def materialize(module: nn.Module, spec: ModelSpec, seed: int, device: str) -> nn.Module:
    """Allocate what is on ``meta`` on `device` and fill every parameter and buffer by (seed, name); return `module`.

    Parameters may be plain or sharded (``DTensor``). Each rank makes the full tensor of one parameter at a time on
    the CPU and keeps its part: no communication, and the same numbers everywhere. Tied parameters stay tied and are
    filled under their first name. Without `spec.init` the module has its own values already, and nothing is done.

    Raises:
        ConfigError: `spec.init` left part of a tensor unfilled.
    """
    if spec.init is None:
        return module
    if any(t.is_meta for t in _parameters_and_buffers(module)):
        ties = _tied_names(module)
        # As `Module.to_empty` does it: parameters are replaced one by one, which separates tied ones.
        module._apply(functools.partial(_allocate, device=device))  # noqa: SLF001
        for first, *others in ties:
            for name in others:
                _set_parameter(module, name, module.get_parameter(first))
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            _copy_part(tensor, _full_tensor(spec, name, tensor, seed))
    return module


def in_place(module: nn.Module, spec: ModelSpec, config: TrainConfig, device: str, autocast: bool = True) -> nn.Module:
    """Activation checkpointing, compilation and autocast as configured; parameter names stay. Returns `module`.

    `module` is the model, or a part of it that has some of `spec.blocks` under their names in the model.

    Checkpointing recomputes each of `spec.blocks` with the random state of its first run, so gradients are bitwise
    the same. Compilation is per block, or of the whole module where there are no blocks. Autocast (bf16, parameters
    stay fp32) spans the module's forward; strategies that mix precision themselves pass ``autocast=False``.
    """
    parts = dict(module.named_modules(remove_duplicate=False))
    blocks = [parts[name] for name in spec.blocks if name in parts]
    if config.activation_checkpointing:
        for block in blocks:
            _change_class(block, _checkpointed)
    if config.compile:
        for part in blocks or [module]:
            part.compile()
    if autocast and config.precision == "bf16":
        _change_class(module, functools.partial(_autocast, device_type=torch.device(device).type))
    return module


def _allocate(tensor: Tensor, device: str) -> Tensor:
    if hasattr(tensor, "placements"):
        return torch.empty_like(tensor, device=device)
    # The same for a plain tensor; but `empty_like` of one on meta imports sympy, which takes a second.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _parameters_and_buffers(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _tied_names(module: nn.Module) -> list[list[str]]:
    """Names of each parameter that has more than one, in the module's order."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)


def _full_tensor(spec: ModelSpec, name: str, like: Tensor, seed: int) -> Tensor:
    assert spec.init is not None
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    # Floating tensors are made in fp32 whatever the parameter's type, and start as NaN to show what was left out.
    floating = like.is_floating_point()
    full = torch.full(like.shape, float("nan") if floating else 0, dtype=torch.float32 if floating else like.dtype)
    spec.init(name, full, generator)
    if floating and full.isnan().any():
        raise ConfigError(
            f"The model's init left '{name}' (shape {list(like.shape)}) unfilled or filled it with NaN; it is called "
            "with every parameter and buffer and must fill the whole tensor in place."
        )
    return full


def _copy_part(tensor: Tensor, full: Tensor) -> None:
    """Copy this rank's part of `full` into `tensor`, plain or sharded."""
    part = piece(tensor)
    for dim, (start, size) in enumerate(zip(part.offset, part.tensor.shape, strict=True)):
        full = full.narrow(dim, min(start, full.shape[dim]), size)
    part.tensor.copy_(full)


def _change_class(module: nn.Module, subclass: Any) -> None:
    """Give `module` a subclass of its class, made by `subclass`, with another ``forward``.

    Unlike a ``forward`` stored on the instance this makes no reference cycle, which would keep the module alive after
    the run, and it survives ``copy.deepcopy``.
    """
    own = module.__dict__.pop("forward", None)
    base: Any = type(module)
    if own is not None:  # someone did store one on the instance; it would hide ours
        base = type(base.__name__, (base,), {"forward": functools.wraps(own)(lambda _, *a, **k: own(*a, **k))})
    module.__class__ = subclass(base)


@functools.cache  # one class for all blocks of a kind, or each would be compiled anew
def _checkpointed(base: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(base.forward, self), *args, use_reentrant=False, **kwargs)

    return _with_forward(base, forward)


@functools.cache
def _autocast(base: type[nn.Module], device_type: str) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, torch.bfloat16):
            return base.forward(self, *args, **kwargs)

    return _with_forward(base, forward)


def _with_forward(base: type[nn.Module], forward: Any) -> type[nn.Module]:
    names = {"forward": functools.wraps(base.forward)(forward), "__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), names)
