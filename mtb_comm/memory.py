"""Least memory that buffers need, checked against this machine's. Pure, but for reading the memory; no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mtb_core import ConfigError

from .definitions import OPERATIONS
from .points import Point
from .sizes import size_text

#: Operations of which the root alone has all of S.
_ROOT_ALONE = ("gather", "scatter")


def refuse_too_large(points: Sequence[Point], local_ranks: int) -> None:
    """Refuse sizes whose buffers cannot be in this machine's memory, where ranks compute on the CPU.

    Raises:
        ConfigError: the message names the point, what it needs and what there is.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for point in points:
        needed = buffer_bytes(point, local_ranks)
        if needed > memory:
            raise ConfigError(
                f"{point} needs {needed / 2**30:,.1f} GiB for the buffers of {local_ranks} ranks, but this machine has "
                f"{memory / 2**30:,.1f} GiB of memory; the largest size asked for is {size_text(point.size_bytes)}, "
                "give smaller ones."
            )


def buffer_bytes(point: Point, local_ranks: int) -> int:
    """Bytes that inputs and outputs of `local_ranks` ranks take together, at least; 0 for what is skipped."""
    size = point.size_bytes
    if point.reason is not None or not size:
        return 0
    part = size // point.ranks if OPERATIONS[point.operation].parts else size
    if point.operation in _ROOT_ALONE:
        return size + (local_ranks - 1) * part
    if point.in_place:
        return size * local_ranks
    return local_ranks * (2 * size if point.operation in ("all_to_all", "send_recv") else size + part)
