"""A row of the results, as the communication document holds it. Pure."""

from __future__ import annotations

from typing import Any

import attrs

from .definitions import DTYPE_BYTES, bandwidths, count_of
from .points import Point
from .timing import time_statistics
from .wire import WireBytes, split_loads, split_wire_bytes, wire_bytes


@attrs.frozen
class Measured:
    """Result of one point: seconds of each iteration; wrong elements on all ranks (None: not checked)."""

    seconds: list[float]
    wrong: int | None
    backend: str


def row_of(point: Point, measured: Measured) -> dict[str, Any]:
    """The row of a point that was measured; bandwidth is of the mean time."""
    times = time_statistics(measured.seconds)
    mean_s = times["mean"] / 1e3
    algbw, busbw = bandwidths(point.operation, point.size_bytes, mean_s, point.ranks)
    sent: WireBytes | None = wire_bytes(point.operation, point.size_bytes, point.ranks, measured.backend)
    busiest, table = None, None
    if point.splits is not None and point.dtype is not None:
        width = DTYPE_BYTES[point.dtype]
        table = [[part * width for part in row] for row in point.splits]
        loads = split_loads(table)
        busiest = loads.index(max(loads))
        busbw = max(loads) / mean_s / 1e9
        sent = split_wire_bytes(table)
    failed = bool(measured.wrong)
    return {
        **_head(point),
        "iterations": len(measured.seconds),
        "time_ms": times,
        "algbw_gb_per_sec": algbw,
        "busbw_gb_per_sec": busbw,
        "wire_bytes": None if sent is None else sent.busiest,
        "wire_bytes_total": None if sent is None else sent.total,
        "wrong": measured.wrong,
        "busiest_rank": busiest,
        "splits_bytes": table,
        "status": "failed" if failed else "ok",
        "reason": f"{measured.wrong} elements are not what they must be" if failed else None,
    }


def skipped_row(point: Point, reason: str) -> dict[str, Any]:
    """The row of a point that cannot be measured."""
    unknown = ("time_ms", "algbw_gb_per_sec", "busbw_gb_per_sec", "wire_bytes", "wire_bytes_total", "wrong")
    return {
        **_head(point),
        "iterations": 0,
        **dict.fromkeys(unknown),
        "busiest_rank": None,
        "splits_bytes": None,
        "status": "skipped",
        "reason": reason,
    }


def _head(point: Point) -> dict[str, Any]:
    return {
        **point.series,
        "size_bytes": point.size_bytes,
        "elements": point.elements,
        "count": count_of(point.operation, point.elements, point.ranks),
    }
