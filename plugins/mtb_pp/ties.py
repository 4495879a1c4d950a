"""Parameters that several stages hold (tied weights): their gradients are summed, so that all copies stay equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn


@attrs.frozen
class Tie:
    """A parameter on this rank that other ranks of the pipeline hold too.

    Attributes:
        ranks: those that hold it, in the pipeline's group, in order; this one among them.
    """

    parameter: nn.Parameter
    ranks: tuple[int, ...]


def ties_of(core: nn.Module, tied: Mapping[str, Sequence[int]], group: dist.ProcessGroup) -> list[Tie]:
    """The trainable ones of `tied` (stages by name) that this rank holds, in the order of their names in `tied`."""
    here = dict(core.named_parameters())
    return [
        Tie(here[name], tuple(stage % group.size() for stage in stages))
        for name, stages in tied.items()
        if name in here and here[name].requires_grad
    ]


def sum_gradients(ties: Sequence[Tie], group: dist.ProcessGroup) -> None:
    """Give every holder the sum of the holders' gradients. Called by all ranks of `group`, after backward.

    All add up in the order of ranks, so that the copies get the same bits. A rank without a gradient counts as zeros and
    stays without one; core then names the parameter.
    """
    own = group.rank()
    operations: list[dist.P2POp] = []
    pending: list[tuple[Tie, dict[int, Tensor]]] = []
    for tie in ties:
        gradient = _local(tie.parameter.grad)
        sent = torch.zeros_like(_local(tie.parameter.detach())) if gradient is None else gradient.contiguous()
        if not sent.numel():  # an empty shard, as the other holders of it have
            continue
        parts = {rank: sent if rank == own else torch.empty_like(sent) for rank in tie.ranks}
        pending.append((tie, parts))
        for rank, part in parts.items():
            if rank != own:
                operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=rank))
                operations.append(dist.P2POp(dist.irecv, part, group=group, group_peer=rank))
    if not operations:
        return
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for tie, parts in pending:
        gradient = _local(tie.parameter.grad)
        if gradient is not None:
            first, *others = parts.values()
            total = first.clone()
            for part in others:
                total += part
            gradient.copy_(total)


def _local(tensor: Any) -> Any:
    """This rank's part of a sharded tensor; any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
