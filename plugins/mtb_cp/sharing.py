"""Communication between the ranks that share a sequence.

Keys and values travel together, as one tensor [2, batch, heads, positions, features] with the keys first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mtb_cp.cutting import Parts


@attrs.define
class Traffic:
    """Bytes of keys, values and their gradients on one rank, counted where they arise.

    Attributes:
        sent: to other ranks; of a collective the share that each rank sends in a ring algorithm.
        held: keys and values that one attention, the last one, keeps for its backward.
    """

    sent: int = 0
    held: int = 0


@attrs.frozen(eq=False)
class Passing:
    """A tensor on its way to the next rank, and the one that comes from the rank before. Both live until they are there."""

    own: Tensor
    received: Tensor
    works: Sequence[dist.Work]

    def wait(self) -> Tensor:
        """The tensor of the rank before."""
        for work in self.works:
            work.wait()
        return self.received


@attrs.frozen(eq=False)
class SharedSequence:
    """A sequence that the ranks of `group` share: rank r of the group has the parts ``cuts[r]``.

    All methods that communicate are called by all ranks of the group, in the same order.
    """

    group: dist.ProcessGroup
    cuts: tuple[Parts, ...]
    traffic: Traffic = attrs.field(factory=Traffic)

    @property
    def ranks(self) -> int:
        """Number of ranks that share the sequence."""
        return len(self.cuts)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.group.rank()

    @property
    def own(self) -> Parts:
        """The parts of this rank."""
        return self.cuts[self.rank]

    def gather(self, own: Tensor) -> Tensor:
        """All positions in order, [..., T, features], from this rank's [..., T / ranks, features]."""
        by_rank = own.new_empty(self.ranks, *own.shape)
        dist.all_gather_single(by_rank.flatten(0, 1), own.contiguous(), group=self.group)
        self.traffic.sent += _bytes(own) * (self.ranks - 1)
        rising = sorted((part.start, rank, i) for rank, parts in enumerate(self.cuts) for i, part in enumerate(parts))
        return torch.cat([self._part(by_rank[rank], i) for _, rank, i in rising], dim=-2)

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """This rank's positions of the sum over ranks of `whole`: the opposite of `gather`, and its gradient."""
        by_rank = torch.stack(
            [torch.cat([whole[..., part.start : part.stop, :] for part in parts], dim=-2) for parts in self.cuts]
        )
        own = torch.empty_like(by_rank[0])
        dist.reduce_scatter_single(own, by_rank.flatten(0, 1), group=self.group)
        self.traffic.sent += _bytes(own) * (self.ranks - 1)
        return own

    def shift(self, own: Tensor) -> Passing:
        """Begin to pass `own` to the next rank. What ranks pass on arrives in the order in which they do so."""
        own, received = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own, group=self.group, group_peer=after),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
            ]
        )
        self.traffic.sent += _bytes(own)
        return Passing(own, received, works)

    def rotate(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its tensor) of every rank, this one first. The next tensor travels while the caller uses one."""
        block = own
        for step in range(self.ranks):
            passing = self.shift(block) if step < self.ranks - 1 else None
            yield (self.rank - step) % self.ranks, block
            if passing is not None:
                block = passing.wait()

    def _part(self, tensor: Tensor, index: int) -> Tensor:
        size = tensor.shape[-2] // len(self.own)
        return tensor[..., index * size : (index + 1) * size, :]


def rows_of(parts: Sequence[range]) -> list[slice]:
    """The place of each of a rank's `parts` among its own positions."""
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
