"""Who writes what: the pure arithmetic of a save."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from .dtypes import CARRIERS, item_bytes
from .metadata import check_tiling


@attrs.frozen
class Part:
    """The description of a `Piece`: key, dtype as torch names it, global shape, offset and local sizes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.sizes) * item_bytes(self.dtype)


def assign(by_rank: Sequence[Sequence[Part]]) -> list[list[int]]:
    """For each rank, the indices of those of its own parts that it writes.

    Every element of every tensor is written exactly once. What several ranks hold is spread so that all write about
    the same number of bytes; the result is the same wherever it is computed.

    Raises:
        ValueError: ranks contradict each other about a tensor, or its parts do not make it up; names the key.
    """
    holders: dict[Part, list[tuple[int, int]]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, parts in enumerate(by_rank):
        for index, part in enumerate(parts):
            if part.dtype not in CARRIERS:
                raise ValueError(f"{part.key!r} on rank {rank} has the dtype {part.dtype}, which has no place in it")
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
