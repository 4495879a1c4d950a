"""The way of rows to the experts of all ranks and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
from torch import Tensor

from .exchange import Exchange
from .permutation import by_own_expert


@attrs.frozen
class Splits:
    """Numbers of rows, on the host.

    Attributes:
        send: to each rank.
        receive: from each rank.
        own: for each expert of this rank.
    """

    send: list[int]
    receive: list[int]
    own: list[int]


def through_experts(
    rows: Tensor,
    received: Tensor,
    splits: Splits,
    exchange: Exchange,
    experts: Callable[[Tensor, Sequence[int]], Tensor],
) -> Tensor:
    """Rows [n, d] through the experts of all ranks, back in the order in which they came. Called by all ranks.

    Ends the phases ``dispatch``, ``permute``, ``expert``, ``unpermute`` and ``combine``.

    Args:
        rows: sorted by expert; owners of experts are in order, so they are sorted by rank too.
        received: int64 [ranks, own experts], the rows that each rank sends to each expert of this rank.
        splits: the sums of these numbers.
        experts: ``experts(rows, splits.own)`` computes rows that are sorted by own expert.
    """
    lap = exchange.lap
    rows = exchange.rows(rows, splits.send, splits.receive, "dispatch")
    order, back = by_own_expert(received, rows.shape[0])
    rows = rows.index_select(0, order)
    lap("permute")
    rows = experts(rows, splits.own)
    lap("expert")
    rows = rows.index_select(0, back)
    lap("unpermute")
    return exchange.rows(rows, splits.receive, splits.send, "combine")
