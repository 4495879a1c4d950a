"""Pairs rows of two measurements, for a table side by side. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from .definitions import OPERATIONS
from .nccl_log import LogRow

_KEY = ("operation", "dtype", "reduction", "in_place", "split", "splits", "world_size", "size_bytes")
#: What both must have been measured under for a ratio to be about the network.
_CONDITIONS = ("groups", "backend", "device")
#: Operations with a root; ours is rank 0.
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


@attrs.frozen
class Pair:
    """The same point in both; a side is None where it lacks it. Mappings with row's keys that the table needs."""

    ours: Mapping[str, Any] | None
    theirs: Mapping[str, Any] | None

    @property
    def shown(self) -> Mapping[str, Any]:
        """The side that is there, ours first; for values that both sides share."""
        side = self.ours if self.ours is not None else self.theirs
        assert side is not None
        return side

    @property
    def ratio(self) -> float | None:
        """Our time by theirs."""
        if self.ours is None or self.theirs is None or not self.theirs["mean_ms"]:
            return None
        return float(self.ours["mean_ms"] / self.theirs["mean_ms"])


def pair_documents(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Pair]:
    """Measured rows of two communication documents, equal in everything but the measurement.

    Uneven splits are equal where every part is. What `other_conditions` names may differ: it must be shown beside.
    """
    return _pair(_plain(ours["results"]), _plain(theirs["results"]), _KEY)


def other_conditions(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Conditions of a whole document that differ, in words: ``"backend gloo here, nccl there"``.

    That the others' times are not valid is one, for it is said nowhere else beside the pairs.
    """
    found = [f"{name} {ours[name]} here, {theirs[name]} there" for name in _CONDITIONS if ours[name] != theirs[name]]
    if theirs["performance_valid"] is False:
        found.append(f"times there are not valid: {'; '.join(theirs['performance_invalid_reasons'])}")
    return found


def comparison(pairs: Sequence[Pair], theirs: str, conditions: Sequence[str]) -> dict[str, Any]:
    """The pairs as JSON values; `theirs` names the other one."""
    points = []
    for pair in pairs:
        point: dict[str, Any] = {name: pair.shown[name] for name in (*_LOG_KEY, "world_size", "split")}
        for whose, side in (("ours", pair.ours), ("theirs", pair.theirs)):
            names = ("mean_ms", "busbw", "world_size", "wrong")
            point[whose] = None if side is None else {name: side[name] for name in names}
        points.append({**point, "ratio": pair.ratio})
    return {"with": theirs, "other_conditions": list(conditions), "points": points}


def pair_log(ours: Mapping[str, Any], log: Sequence[LogRow]) -> list[Pair]:
    """Measured rows of a document and those of an nccl-tests log.

    Where torch has only one placement for the operation, the log's other half is left out. A log that does not name
    its program is taken for the only operation that was measured. The number of ranks may differ: busbw is made for
    that, and both are shown. Each line of a log that has several of a size is a pair; lines for a root other than
    rank 0, which is ours, stand alone.
    """
    rows = _plain(ours["results"])
    operations = {row["operation"] for row in rows if row["size_bytes"]}
    only = next(iter(operations)) if len(operations) == 1 else None
    theirs = [_of_log(entry, only) for entry in log]
    return _pair([r for r in rows if r["split"] != "uneven"], [t for t in theirs if t is not None], _LOG_KEY)


_LOG_KEY = ("operation", "dtype", "reduction", "in_place", "root", "size_bytes")


def _of_log(entry: LogRow, only: str | None) -> dict[str, Any] | None:
    operation = entry.operation or only
    known = OPERATIONS.get(operation or "")
    if known is not None and entry.in_place not in known.placements:
        return None
    return {
        "operation": operation,
        "dtype": entry.dtype,
        "reduction": entry.reduction if known is None or known.reduces else None,
        "in_place": entry.in_place,
        "split": None,
        "splits": None,
        "root": (entry.root or 0) if operation in _ROOTED else entry.root or None,
        "wrong": entry.wrong,
        "world_size": entry.world_size,
        "size_bytes": entry.size_bytes,
        "mean_ms": entry.time_ms,
        "busbw": entry.busbw_gb_per_sec,
    }


def _plain(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **{name: row[name] for name in _KEY if name != "splits"},
            "splits": None if row["splits_bytes"] is None else tuple(map(tuple, row["splits_bytes"])),
            "root": 0 if row["operation"] in _ROOTED else None,
            "wrong": row["wrong"],
            "mean_ms": row["time_ms"]["mean"],
            "busbw": row["busbw_gb_per_sec"],
        }
        for row in rows
        if row["time_ms"] is not None
    ]


def _pair(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], key: Sequence[str]) -> list[Pair]:
    """Ours in their order, each with its counterpart, then what only the others have of the same operations."""
    operations = {row["operation"] for row in ours}
    left: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in theirs:
        if row["operation"] in operations:
            left.setdefault(tuple(row[name] for name in key), []).append(row)
    pairs = [Pair(row, other) for row in ours for other in left.pop(tuple(row[name] for name in key), [None])]
    return pairs + [Pair(None, row) for rows in left.values() for row in rows]
