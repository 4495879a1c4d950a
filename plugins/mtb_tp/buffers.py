"""Buffers, which every rank holds whole: where samples differ over ranks, they are those of rank 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def broadcast_buffers(buffers: Iterable[Tensor]) -> None:
    """Give every rank the buffers of rank 0, in one message for each device. All ranks.

    They may have any dtype and any strides: what travels is a contiguous copy of their bytes. Of a buffer that was
    expanded, each element lies in memory once, so it travels once and is written once.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for buffer in buffers:
        by_device.setdefault(buffer.device, []).append(_distinct(buffer))
    with torch.no_grad():
        for same in by_device.values():
            flat = torch.cat([_bytes(b) for b in same])
            if not flat.numel():
                continue
            dist.broadcast(flat, src=0)
            for buffer, part in zip(same, flat.split([b.numel() * b.element_size() for b in same]), strict=True):
                # Cloned, for a part may begin where the dtype may not.
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _distinct(buffer: Tensor) -> Tensor:
    """A view without the repetitions of dimensions that were expanded."""
    return buffer.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in buffer.stride())]


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.contiguous().reshape(-1).view(torch.uint8)


class BufferSync:
    """Broadcasts buffers when DDP would: at each forward that follows a synchronised micro-batch.

    As a forward pre-hook of the model it covers evaluation too, so it makes no difference whether a checkpoint, which
    shares buffers as well, was saved before. Buffers are looked up each time, for a model may replace them.
    """

    def __init__(self) -> None:
        self.due = True

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002  (a hook gets them)
        """Before a forward of `module`."""
        if self.due:
            broadcast_buffers(module.buffers())
