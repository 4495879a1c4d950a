"""Division of a save among the ranks. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from .entries import Part, check_tiling


def assign(by_rank: Sequence[Sequence[Part]], dtypes: Collection[str]) -> list[list[int]]:
    """For each rank, the indices of those of its own parts that it writes; `dtypes` are those that can be stored.

    Every element of every tensor is written exactly once. What several ranks hold is spread so that all write about
    the same number of bytes; the result is the same wherever it is computed.

    Raises:
        ValueError: ranks contradict each other about a tensor, or its parts do not make it up, or it has a dtype or a
            key that cannot be stored; names the key.
    """
    holders: dict[Part, list[tuple[int, int]]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, parts in enumerate(by_rank):
        for index, part in enumerate(parts):
            if part.dtype not in dtypes:
                raise ValueError(
                    f"{part.key!r} on rank {rank} is {part.dtype}, which the checkpoint format cannot store; it can "
                    f"store {', '.join(sorted(dtypes))}"
                )
            _check_key(part.key)
            kind = kinds.setdefault(part.key, (part.dtype, part.shape))
            if kind != (part.dtype, part.shape):
                raise ValueError(
                    f"{part.key!r} is {part.dtype} {part.shape} on rank {rank}, but {kind[0]} {kind[1]} elsewhere"
                )
            if part.nbytes or not math.prod(part.shape):
                holders.setdefault(part, []).append((rank, index))
    boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {key: [] for key in kinds}
    for part in holders:
        boxes[part.key].append((part.offset, part.sizes))
    for key, (_, shape) in kinds.items():
        check_tiling(key, shape, boxes[key])
    chosen: list[list[int]] = [[] for _ in by_rank]
    load = [0] * len(by_rank)
    for part, places in sorted(holders.items(), key=lambda item: (-item[0].nbytes, item[0].key, item[0].offset)):
        rank, index = min(places, key=lambda place: (load[place[0]], place))
        chosen[rank].append(index)
        load[rank] += part.nbytes
    return [sorted(indices) for indices in chosen]


def _check_key(key: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{key!r} has half of a surrogate pair in it, which no file can hold") from None
