"""What is not sharded: buffers, and parameters without dimensions. Every rank holds them whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtb_core import broadcast_buffers


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace the gradients of replicated `parameters` by their sums over ranks. All ranks.

    A parameter without gradient counts as zero on that rank; one that has none on any rank keeps none.
    """
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    present = torch.tensor([float(p.grad is not None) for p in parameters], device=gradients[0].device)
    flat = torch.cat([*(g.reshape(-1).float() for g in gradients), present])
    dist.all_reduce(flat)
    _copy_back(flat, gradients)
    for parameter, gradient, ranks in zip(parameters, gradients, flat[-len(parameters) :].tolist(), strict=True):
        parameter.grad = gradient if ranks else None


def _copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


class BufferSync:
    """Broadcasts the buffers of rank 0 when DDP would: at each forward that follows a synchronised micro-batch.

    As a forward pre-hook of the root it covers evaluation too. Buffers are looked up each time, for a model may
    replace them.
    """

    def __init__(self) -> None:
        self.due = True

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002  (a hook gets them)
        """Before a forward of `module`."""
        if self.due:
            broadcast_buffers(module.buffers())
