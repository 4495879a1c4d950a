"""Holding one distributed pass against the naive one on all ranks' tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from mtb_core import RankContext, from_rank_zero, gather_objects

from .experts import PARAMETERS
from .layer import MoELayer, Passed
from .naive import moe

#: Largest relative error ``|a - b| / |b|`` (Euclidean norms) of each compared tensor, by dtype.
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-12, "bf16": 2e-2}


@attrs.frozen
class Inputs:
    """Inputs of one rank: tokens [T, d], a leaf with a gradient; preferences; d(loss)/d(output) [T, d]."""

    x: Tensor
    preference: Tensor | None
    cotangent: Tensor


@attrs.frozen
class _Part:
    """One rank's side of the comparison, on the CPU."""

    x: Tensor
    preference: Tensor | None
    cotangent: Tensor
    output: Tensor
    x_grad: Tensor | None
    router_grad: Tensor | None
    experts: list[Tensor]
    expert_grads: list[Tensor | None]
    losses: tuple[float, float]
    dropped: int


def differentiate(passed: Passed, cotangent: Tensor, layer: MoELayer) -> None:
    """Backward pass of this rank's share of ``sum(output * cotangent)`` and both weighted losses; called by all ranks."""
    settings = layer.settings
    roots = [
        (passed.output, cotangent),
        (passed.load_balancing, torch.full_like(passed.load_balancing, settings.aux_weight)),
        (passed.z_loss, torch.full_like(passed.z_loss, settings.z_weight)),
    ]
    # Where experts choose there is no load to balance, and that loss is a constant.
    roots = [(value, grad) for value, grad in roots if value.requires_grad]
    values, grads = zip(*roots, strict=True)
    torch.autograd.backward(values, grads)


def compare(ctx: RankContext, layer: MoELayer, inputs: Inputs, passed: Passed) -> dict[str, float]:
    """Relative errors of a pass after its backward, by quantity, the same on all ranks; called by all ranks.

    ``expert_grads`` is the worst of all tensors of all experts, each alone. A gradient that is missing where it must
    be, be it of an expert without a token, counts as infinite. The naive pass runs on rank 0.
    """
    parts = gather_objects(ctx, _part(layer, inputs, passed))
    errors = _errors(parts, layer, ctx.device) if ctx.rank == 0 else {}
    return from_rank_zero(ctx, errors)


def _part(layer: MoELayer, inputs: Inputs, passed: Passed) -> _Part:
    parameters = [layer.experts.get_parameter(name) for name in PARAMETERS] if layer.experts.count else []
    return _Part(
        x=inputs.x.detach().cpu(),
        preference=None if inputs.preference is None else inputs.preference.cpu(),
        cotangent=inputs.cotangent.cpu(),
        output=passed.output.detach().cpu(),
        x_grad=_cpu(inputs.x.grad),
        router_grad=_cpu(layer.router.grad),
        experts=[p.detach().cpu() for p in parameters],
        expert_grads=[_cpu(p.grad) for p in parameters],
        losses=(passed.load_balancing.item(), passed.z_loss.item()),
        dropped=passed.traffic().dropped_slots,
    )


def _cpu(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.cpu()


def _errors(parts: Sequence[_Part], layer: MoELayer, device: str) -> dict[str, float]:
    settings = layer.settings
    chunks = [part.x.to(device).requires_grad_() for part in parts]
    router = layer.router.detach().clone().requires_grad_()
    experts = [
        [tensor[i].to(device).requires_grad_() for tensor in part.experts]
        for part, count in zip(parts, layer.per_rank, strict=True)
        for i in range(count)
    ]
    preferences = [part.preference for part in parts if part.preference is not None]
    passed = moe(chunks, router, experts, torch.cat(preferences).to(device) if preferences else None, settings)
    loss = (passed.output * torch.cat([part.cotangent for part in parts]).to(device)).sum()
    loss = loss + settings.aux_weight * passed.load_balancing + settings.z_weight * passed.z_loss
    loss.backward()

    expert_grads = [
        None if grad is None else grad[i]
        for part, count in zip(parts, layer.per_rank, strict=True)
        for i in range(count)
        for grad in part.expert_grads
    ]
    reference = [tensor for expert in experts for tensor in expert]
    return {
        "output": _relative(_join([part.output for part in parts]), passed.output.detach()),
        "input_grad": _relative(_join([part.x_grad for part in parts]), torch.cat([_grad(c) for c in chunks])),
        "router_grad": _relative(_total([part.router_grad for part in parts]), _grad(router)),
        "expert_grads": _worst(_relative(a, _grad(b)) for a, b in zip(expert_grads, reference, strict=True)),
        "load_balancing_loss": _relative_number(sum(part.losses[0] for part in parts), passed.load_balancing),
        "z_loss": _relative_number(sum(part.losses[1] for part in parts), passed.z_loss),
        "dropped_slots": float(abs(sum(part.dropped for part in parts) - passed.dropped)),
    }


def _worst(errors: Iterable[float]) -> float:
    """The largest, or NaN if any is NaN: `max` alone forgets a NaN that is not the first."""
    worst = 0.0
    for error in errors:
        if not error <= worst:
            worst = error
        if math.isnan(worst):
            break
    return worst


def _join(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [t for t in tensors if t is not None]
    return torch.cat(present) if len(present) == len(tensors) else None


def _total(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [t for t in tensors if t is not None]
    return torch.stack(present).sum(dim=0) if len(present) == len(tensors) else None


def _grad(leaf: Tensor) -> Tensor:
    """Nothing flowed into an expert of whose empty batch autograd makes nothing: that is a gradient of zeros."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _relative(value: Tensor | None, reference: Tensor) -> float:
    """``|value - reference| / |reference|``; where the reference is zero, 0 or infinity."""
    if value is None or value.shape != reference.shape:
        return math.inf
    wide = reference.double().cpu()
    difference, size = float((value.double() - wide).norm()), float(wide.norm())
    if difference == 0.0:
        return 0.0
    return difference / size if size else math.inf


def _relative_number(value: float, reference: Tensor) -> float:
    return _relative(torch.tensor(value, dtype=torch.float64), reference.detach())


def failures(errors: dict[str, Any], dtype: str) -> list[str]:
    """The quantities whose error is above the tolerance of `dtype`; NaN is above it."""
    limit = TOLERANCE[dtype]
    return [name for name, error in errors.items() if not error <= limit]
