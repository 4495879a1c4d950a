"""Definitions of the measured quantities, in the terms of nccl-tests. Pure functions, no torch.

Source of S, algbw and busbw: nccl-tests, ``doc/PERFORMANCE.md`` and ``src/*.cu``
(https://github.com/NVIDIA/nccl-tests). A gigabyte is 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

#: Said wherever bandwidth is shown.
DEFINITION = "algbw = S/t and busbw = algbw x factor as nccl-tests defines them; GB = 1e9 bytes"

#: Bytes of one element.
DTYPE_BYTES = {"fp32": 4, "fp64": 8, "fp16": 2, "bf16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}
FLOAT_DTYPES = ("fp32", "fp64", "fp16", "bf16")
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def _all_reduce(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _scattered(ranks: int) -> float:
    return (ranks - 1) / ranks


def _whole(_ranks: int) -> float:
    return 1.0


@attrs.frozen
class Operation:
    """A collective operation.

    Attributes:
        factor: busbw / algbw by number of ranks, for two or more.
        parts: S consists of one equal part per rank, so it is rounded down to whole elements of each part.
        reduces: it takes a reduction.
        placements: ``in_place`` values that torch.distributed offers, the usual one first; empty: it has no data.
    """

    name: str
    factor: Callable[[int], float]
    parts: bool
    reduces: bool
    placements: tuple[bool, ...]


OPERATIONS = {
    op.name: op
    for op in (
        Operation("all_reduce", _all_reduce, parts=False, reduces=True, placements=(True,)),
        Operation("all_gather", _scattered, parts=True, reduces=False, placements=(False, True)),
        Operation("reduce_scatter", _scattered, parts=True, reduces=True, placements=(False, True)),
        Operation("all_to_all", _scattered, parts=True, reduces=False, placements=(False,)),
        Operation("broadcast", _whole, parts=False, reduces=False, placements=(True,)),
        Operation("reduce", _whole, parts=False, reduces=True, placements=(True,)),
        Operation("gather", _scattered, parts=True, reduces=False, placements=(False, True)),
        Operation("scatter", _scattered, parts=True, reduces=False, placements=(False, True)),
        Operation("send_recv", _whole, parts=False, reduces=False, placements=(False,)),
        Operation("barrier", _whole, parts=False, reduces=False, placements=()),
    )
}


def bus_factor(operation: str, ranks: int) -> float:
    """The ratio busbw / algbw of `operation` on `ranks` ranks: 2(n-1)/n, (n-1)/n or 1; 0 on one rank, which uses no bus."""
    return OPERATIONS[operation].factor(ranks) if ranks > 1 else 0.0


def bandwidths(operation: str, size_bytes: int, seconds: float, ranks: int) -> tuple[float | None, float | None]:
    """(algbw, busbw) in 10^9 bytes per second; None if the size or the time is 0.

    `size_bytes` is S, the bytes of the whole buffer. One rank holds it at the end for all_gather and gather, at the
    beginning for reduce_scatter and scatter, and both times for the others.
    """
    if not size_bytes or seconds <= 0:
        return None, None
    algbw = size_bytes / seconds / 1e9
    return algbw, algbw * bus_factor(operation, ranks)


def whole_elements(operation: str, size_bytes: int, dtype: str, ranks: int, *, uneven: bool = False) -> int:
    """Elements in the largest S of at most `size_bytes` that `operation` can have; 0 where there is none."""
    elements = size_bytes // DTYPE_BYTES[dtype]
    if OPERATIONS[operation].parts and not uneven:
        return elements - elements % ranks
    return elements


def count_of(operation: str, elements: int, ranks: int) -> int:
    """The ``count`` column of nccl-tests: elements of one rank's part if S has parts, else all elements."""
    return elements // ranks if OPERATIONS[operation].parts else elements
