"""One model on several ranks: buffers are those of the first of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup


def broadcast_buffers(buffers: Iterable[Tensor], group: ProcessGroup | None = None) -> None:
    """Give every rank of `group` the buffers of its first, in one message for each dtype and device. All its ranks.

    None is the group of all ranks.

    Collectives on CPU read and write behind a tensor whose elements do not lie one behind the other; so copies are
    sent. Of a dimension made by ``expand`` the one element that is there is sent.
    """
    import torch  # noqa: PLC0415  (torch is imported when it is used)
    import torch.distributed as dist  # noqa: PLC0415

    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        by_kind.setdefault((buffer.dtype, buffer.device), []).append(without_repeats(buffer))
    with torch.no_grad():
        for same in by_kind.values():
            flat = torch.cat([b.reshape(-1) for b in same])
            dist.broadcast(flat, group=group, group_src=0)
            for buffer, sent in zip(same, flat.split([b.numel() for b in same]), strict=True):
                buffer.copy_(sent.view(buffer.shape))


class BufferSync:
    """Broadcasts the buffers of a group's first rank when DDP would: at a forward after a synchronised micro-batch.

    As a forward pre-hook of a model it covers evaluation too, so it makes no difference whether a checkpoint, which
    shares buffers as well, was saved before. Buffers are looked up each time, for a model may replace them.

    Attributes:
        due: whether the next forward is such a one; strategies set it after every micro-batch.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.due = True
        self._group = group

    @classmethod
    def of(cls, module: nn.Module, group: ProcessGroup | None = None) -> BufferSync | None:
        """One that is hooked into `module`; None where it has no buffers. Without `group` it serves all ranks."""
        if next(module.buffers(), None) is None:
            return None
        sync = cls(group)
        module.register_forward_pre_hook(sync)
        return sync

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002  (a hook gets them)
        """Before a forward of `module`. All ranks of the group."""
        if self.due:
            broadcast_buffers(module.buffers(), self._group)


def without_repeats(buffer: Tensor) -> Tensor:
    """A view of the same elements, of as many dimensions, where one made by ``expand`` has size 1."""
    for dimension, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        if size > 1 and stride == 0:
            buffer = buffer.narrow(dimension, 0, 1)
    return buffer
