"""Parameters without dimensions cannot be sharded: every rank holds them whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sum_gradients(parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup]) -> None:
    """Replace the gradients of replicated `parameters` by their sums over each of `groups`, one after the other.

    All ranks of the groups.

    A parameter without gradient counts as zero on that rank; one that has none on any rank keeps none.
    """
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    present = torch.tensor([float(p.grad is not None) for p in parameters], device=gradients[0].device)
    flat = torch.cat([*(g.reshape(-1).float() for g in gradients), present])
    for group in groups:
        dist.all_reduce(flat, group=group)
    _copy_back(flat, gradients)
    for parameter, gradient, ranks in zip(parameters, gradients, flat[-len(parameters) :].tolist(), strict=True):
        parameter.grad = gradient if ranks else None


def _copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
