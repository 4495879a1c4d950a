"""The cut of a sequence into the positions of each context-parallel rank. Pure arithmetic, torch-free."""

from __future__ import annotations

from collections.abc import Sequence

BALANCES = ("zigzag", "contiguous")

#: The parts of one rank: ranges of positions, rising, all of one length.
Parts = tuple[range, ...]


def number_of_parts(ranks: int, balance: str) -> int:
    """Number of equal parts that a sequence is cut into: one for each rank, or two with ``zigzag``."""
    return 2 * ranks if balance == "zigzag" else ranks


def cut(length: int, ranks: int, balance: str) -> tuple[Parts, ...]:
    """The parts of each rank. `length` is a multiple of `number_of_parts`.

    With ``contiguous`` rank r has part r. With ``zigzag`` it has part r from the front and part r from the end, so that
    under a causal mask all ranks have the same number of (query, key) pairs.
    """
    count = number_of_parts(ranks, balance)
    size = length // count
    parts = [range(i * size, (i + 1) * size) for i in range(count)]
    if balance == "zigzag":
        return tuple((parts[rank], parts[count - 1 - rank]) for rank in range(ranks))
    return tuple((part,) for part in parts)


def positions_of(parts: Parts) -> list[int]:
    """All positions of `parts`, in order."""
    return [position for part in parts for position in part]


def causal_shares(cuts: Sequence[Parts]) -> list[float]:
    """The share of each rank in all (query, key) pairs of causal attention; they sum up to 1."""
    pairs = [sum(position + 1 for position in positions_of(parts)) for parts in cuts]
    return [count / sum(pairs) for count in pairs]
