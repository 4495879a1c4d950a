"""The filled model, for every stage; at stage 3 no rank ever holds more than one whole parameter."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn

from mtb_core import ConfigError, Job

from . import private


@attrs.frozen
class Weights:
    """Elements from `start` on of one parameter, flat, in fp32."""

    start: int
    flat: torch.Tensor


@attrs.frozen
class Built:
    """A filled module, the optimizer's groups of its parameters, and what the engine will cast to bf16.

    Attributes:
        weights: the fp32 values of this rank's parts, by name; empty where nothing is cast.
    """

    module: nn.Module
    groups: list[dict[str, Any]]
    weights: dict[str, Weights]


def build(job: Job, deepspeed: Any, settings: dict[str, Any]) -> Built:
    """Build and fill the model by (seed, name), split over ranks at stage 3. All ranks, `joined`; no communication.

    Raises:
        ConfigError: on all ranks; it has a parameter that the engine cannot handle.
    """
    stage, low_precision = settings["zero_optimization"]["stage"], settings["bf16"]["enabled"]
    module = job.build()
    _check(module, stage)
    # At stage 3 the engine leaves an empty tensor of each parameter, which does not show how it is to be grouped.
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in job.optimizer_groups(module)]
    weights: dict[str, Weights] = {}
    if stage == 3:
        _fill_and_split(module, job, deepspeed, settings, weights)
    else:
        job.materialize(module)
        if low_precision:
            for name, parameter in module.named_parameters():
                # No copy: casting gives the parameter new storage and leaves this one.
                weights[name] = Weights(0, parameter.detach().view(-1))
    # The engine casts parameters itself; core's autocast serves where they stay fp32.
    job.in_place(module, autocast=not low_precision)
    now = dict(module.named_parameters())
    return Built(module, [{**g, "params": [now[name] for name in g["params"]]} for g in groups], weights)


def _check(module: nn.Module, stage: int) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"Parameter '{name}' is {str(parameter.dtype).removeprefix('torch.')}; strategy 'deepspeed' keeps and "
                "updates all weights in fp32 and casts them itself, so a model must be float32 when it is built. Convert "
                "it with float(), make it a buffer, or use strategy ddp."
            )
        if stage == 3 and not parameter.numel():
            raise ConfigError(
                f"Parameter '{name}' has no elements (shape {tuple(parameter.shape)}), which DeepSpeed cannot split over "
                "ranks at stage=3. Remove it, or use stage=2."
            )


def _fill_and_split(
    module: nn.Module, job: Job, deepspeed: Any, settings: dict[str, Any], weights: dict[str, Weights]
) -> None:
    """Fill parameter by parameter, and keep this rank's part of each before the next is made."""
    low_precision = settings["bf16"]["enabled"]
    init = deepspeed.zero.Init(config_dict_or_path=settings)
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, parameter in list(module.named_parameters()):
        whole = _filled(name, parameter, job)
        for alias in names[id(parameter)]:
            _set(module, alias, whole)
        if low_precision:
            size = -(-whole.numel() // job.ctx.world_size)
            start = min(job.ctx.rank * size, whole.numel())
            flat = whole.detach().view(-1)
            weights[name] = Weights(start, flat[start : start + size].clone())
            whole.data = whole.data.to(torch.bfloat16)
        private.partition([whole], init)
    for name, buffer in list(module.named_buffers()):
        _set(module, name, _filled(name, buffer, job))


def _filled(name: str, tensor: torch.Tensor, job: Job) -> Any:
    """The final `tensor` for `name`: filled by core if it is on ``meta``, else itself."""
    if not tensor.is_meta:
        return tensor
    # Core fills modules; so this one tensor gets a module of its own, in which it has the same name.
    outer = nn.Module()
    inner = outer
    *path, leaf = name.split(".")
    for part in path:
        child = nn.Module()
        inner.add_module(part, child)
        inner = child
    if isinstance(tensor, nn.Parameter):
        inner.register_parameter(leaf, tensor)
    else:
        inner.register_buffer(leaf, tensor)
    job.materialize(outer)
    return getattr(inner, leaf)


def _set(module: nn.Module, name: str, tensor: Any) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, tensor)
