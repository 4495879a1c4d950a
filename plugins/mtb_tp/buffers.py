"""Buffers, which every rank holds whole: where samples differ over ranks, they are those of rank 0."""

from __future__ import annotations

from typing import Any

from torch import nn

from mtb_core import broadcast_buffers


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
