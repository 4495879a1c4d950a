"""Exchange between ranks: first counts, then rows of tokens; gradients travel back the same way.

Every function here is called by all ranks, in the same order, also by ranks that have no token and own no expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Lap = Callable[[str], None]


def _no_lap(phase: str) -> None:
    """For those who take no times."""


class Exchange:
    """The collectives of an MoE layer over the ranks of `group` (None: all); `lap(name)` is told when one has ended.

    Attributes:
        count_bytes: bytes that this rank sent to others in exchanges of counts and scores so far.
        row_bytes: bytes of rows, and of their gradients, that it sent to others so far.
    """

    def __init__(self, lap: Lap = _no_lap, group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.lap = lap
        self.count_bytes = self.row_bytes = 0
        self._group = group

    def gather(self, counts: Tensor) -> Tensor:
        """[n] of every rank, as [ranks, n] on every rank (int64). Ends the phases ``gate`` and ``count_exchange``."""
        self.lap("gate")
        everyone = counts.new_empty(self.ranks * counts.shape[0])
        dist.all_gather_single(everyone, counts.contiguous(), group=self._group)
        self.count_bytes += counts.nbytes * (self.ranks - 1)
        self.lap("count_exchange")
        return everyone.view(self.ranks, -1)

    def swap_counts(self, rows_per_expert: Tensor, experts_per_rank: Sequence[int]) -> Tensor:
        """Number of rows that each rank will send to each expert of this rank: [ranks, own experts].

        `rows_per_expert` [E] are the rows that this rank will send to each expert. Ends the phase ``count_exchange``.
        """
        own = experts_per_rank[self.rank]
        received = rows_per_expert.new_empty(self.ranks * own)
        splits = [own] * self.ranks, list(experts_per_rank)
        dist.all_to_all_single(received, rows_per_expert.contiguous(), *splits, group=self._group)
        self.count_bytes += rows_per_expert.nbytes - own * rows_per_expert.element_size()
        self.lap("count_exchange")
        return received.view(self.ranks, own)

    def rows(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Tensor:
        """Send the first ``send[0]`` rows to rank 0, the next to rank 1, …; returns what was received, by rank.

        Differentiable; the gradients travel the other way in the backward pass, where this ends the phases
        ``backward`` (what came before) and ``{phase}_backward``.

        Raises:
            ValueError: the splits do not sum to the rows; raised before the call, which would hang or abort.
        """
        if sum(send) != rows.shape[0] or len(send) != self.ranks or len(receive) != self.ranks:
            msg = (
                f"The splits {list(send)} and {list(receive)} of an all-to-all must have one number for each of "
                f"{self.ranks} ranks, and the first must sum to the {rows.shape[0]} rows that there are."
            )
            raise ValueError(msg)
        out: Tensor = _Rows.apply(rows, list(send), list(receive), phase, self)  # type: ignore[no-untyped-call]
        return out

    def scores(self, scores: Tensor) -> tuple[Tensor, int]:
        """The rows of every rank, one after the other, and where this rank's begin; ranks may have different numbers."""
        lengths = self.gather(torch.tensor([scores.shape[0]], device=scores.device)).flatten().tolist()
        mine = scores.detach().repeat(self.ranks, 1)
        everyone = self._swap(mine, [scores.shape[0]] * self.ranks, lengths)
        self.count_bytes += scores.nbytes * (self.ranks - 1)
        self.lap("count_exchange")
        return everyone, sum(lengths[: self.rank])

    def _move(self, rows: Tensor, send: list[int], receive: list[int], phase: str) -> Tensor:
        self.row_bytes += (rows.shape[0] - send[self.rank]) * rows.shape[1] * rows.element_size()
        out = self._swap(rows, send, receive)
        self.lap(phase)
        return out

    def _swap(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=self._group)
        return out


class _Rows(torch.autograd.Function):
    """All-to-all of rows; its gradient is the all-to-all with the splits exchanged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], phase: str, exchange: Exchange) -> Tensor:
        ctx.splits, ctx.phase, ctx.exchange = (send, receive), phase, exchange
        return exchange._move(rows, send, receive, phase)  # noqa: SLF001  (one thing with `Exchange`)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        send, receive = ctx.splits
        ctx.exchange.lap("backward")
        return ctx.exchange._move(grad, receive, send, f"{ctx.phase}_backward"), None, None, None, None  # noqa: SLF001
