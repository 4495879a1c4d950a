"""Model and optimizer state in global coordinates, for plain and ``DTensor`` parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .values import Piece, State


def piece(tensor: Any) -> Piece:
    """This rank's part of `tensor`, as a live view."""
    if not hasattr(tensor, "device_mesh"):  # no DTensor; importing that class to ask takes a second
        return Piece(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local: torch.Tensor = tensor.to_local().detach()
    return Piece(local, tuple(tensor.shape), tuple(offset))


def module_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """State of a module and its optimizer, whose parameters are `module`'s own.

    Tied parameters appear once, under their first name; non-persistent buffers not at all. Missing optimizer state of
    trainable parameters is created as zeros first, as the optimizer itself would at its first step.
    """
    create_missing_state(optimizer)
    pieces: dict[str, list[Piece]] = {}
    for name, parameter in module.named_parameters():
        pieces[f"model/{name}"] = [piece(parameter)]
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                pieces[f"optim/{name}/{key}"] = [piece(value)]
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            pieces[f"model/{name}"] = [piece(buffer)]
    return State(pieces)


def create_missing_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that an optimizer makes at its first step, as it is before that step, without taking one.

    An optimizer with a method ``initial_state(parameter, group)`` says itself what that is; otherwise it is taken for
    AdamW (a group with ``betas``) or SGD with momentum.
    """
    initial = getattr(optimizer, "initial_state", _initial_state)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter) and (made := initial(parameter, group)):
                optimizer.state[parameter] = made


def _initial_state(parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
    if "betas" in group:
        on_device = group.get("fused") or group.get("capturable")
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu"),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return {"momentum_buffer": torch.zeros_like(parameter)} if group.get("momentum") else {}
