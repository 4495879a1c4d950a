"""The bytes that a backend's algorithm sends for one call. Pure.

Gloo's algorithms are fixed for torch 2.13 and were compared with an interface's byte counters. All_reduce is a ring of
reduce-scatter and all-gather; reduce_scatter is an all_reduce of the whole buffer; broadcast is a binomial tree; reduce
is a ring reduce-scatter whose parts the root collects. NCCL chooses its algorithm when it runs (ring, tree, in the
network); only what it does point to point is known beforehand. Headers are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

_POINT_TO_POINT = ("all_to_all", "gather", "scatter", "send_recv")


@attrs.frozen
class WireBytes:
    """Bytes sent in one call: `busiest`, by the rank that sends most; `total`, by all ranks of the group."""

    busiest: int
    total: int


def wire_bytes(operation: str, size_bytes: int, ranks: int, backend: str) -> WireBytes | None:
    """Bytes that one call with S = `size_bytes` sends between ranks; None where the backend's way is not known."""
    if ranks == 1:
        return WireBytes(0, 0)
    if backend != "gloo" and operation not in _POINT_TO_POINT:
        return None
    n, others = ranks, ranks - 1
    ring = size_bytes * others // n
    busiest, total = {
        "all_reduce": (2 * ring, 2 * size_bytes * others),
        "reduce_scatter": (2 * ring, 2 * size_bytes * others),
        "all_gather": (ring, size_bytes * others),
        "all_to_all": (ring, size_bytes * others),
        "broadcast": (size_bytes * (others.bit_length()), size_bytes * others),
        "reduce": (size_bytes, size_bytes * others + ring),
        "gather": (size_bytes // n, ring),
        "scatter": (ring, ring),
        "send_recv": (size_bytes, size_bytes * n),
        "barrier": (0, 0),
    }[operation]
    return WireBytes(busiest, total)


def split_wire_bytes(splits: Sequence[Sequence[int]]) -> WireBytes:
    """The same for an uneven all_to_all: `splits` holds the bytes that each rank sends to each."""
    sent = [sum(row) - row[rank] for rank, row in enumerate(splits)]
    return WireBytes(max(sent), sum(sent))


def split_loads(splits: Sequence[Sequence[int]]) -> list[int]:
    """For each rank, the larger of the bytes it sends to and receives from others."""
    ranks = range(len(splits))
    return [max(sum(splits[r]) - splits[r][r], sum(row[r] for row in splits) - splits[r][r]) for r in ranks]
