"""The results as tables for people, on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .compare import Pair
from .definitions import DEFINITION, OPERATIONS
from .sizes import size_text

if TYPE_CHECKING:
    from rich.table import Table

#: Width where stdout is no terminal and ``COLUMNS`` does not say: all columns, unbroken.
PIPE_WIDTH = 200


def print_document(document: Mapping[str, Any]) -> None:
    """Measured rows, skipped ones with their reasons, and the fits."""
    from rich.text import Text  # noqa: PLC0415  (imported when something is shown)

    parts: list[Any] = [Text(_title(document), style="bold"), _results(document["results"]), Text(DEFINITION)]
    parts += [Text(line) for line in _skipped(document["results"])]
    if document["fits"]:
        parts.append(_fits(document["fits"]))
    if not document["performance_valid"]:
        parts.append("not to compare: " + "; ".join(document["performance_invalid_reasons"]))
    _write(parts)


def print_pairs(pairs: Sequence[Pair], theirs: str, conditions: Sequence[str] = ()) -> None:
    """Two measurements side by side; `theirs` names the other one, `conditions` what both do not share."""
    from rich.text import Text  # noqa: PLC0415

    wrong = any(pair.theirs is not None and pair.theirs["wrong"] for pair in pairs)
    table = _table(
        "operation",
        "dtype",
        "",
        "size",
        "ranks",
        "ms",
        f"ms, {theirs}",
        "ours / theirs",
        "busbw",
        f"busbw, {theirs}",
        *([f"wrong, {theirs}"] if wrong else []),
    )
    for pair in pairs:
        ours, other = pair.ours or {}, pair.theirs or {}
        ratio = pair.ratio
        ranks = [str(side["world_size"] or "?") for side in (pair.ours, pair.theirs) if side is not None]
        table.add_row(
            pair.shown["operation"] or "?",
            pair.shown["dtype"] or "",
            _kind(pair.shown),
            _size(pair.shown),
            " / ".join(dict.fromkeys(ranks)),
            _number(ours.get("mean_ms")),
            _number(other.get("mean_ms")),
            "" if ratio is None else f"{ratio:.3f}",
            _number(ours.get("busbw")),
            _number(other.get("busbw")),
            *([str(other.get("wrong") or "")] if wrong else []),
        )
    matched = sum(pair.ratio is not None for pair in pairs)
    parts: list[Any] = [Text(f"this run and {theirs}: {matched} points in both", style="bold")]
    parts += [Text(f"not the same conditions: {text}") for text in conditions]
    _write([*parts, table])


def _title(document: Mapping[str, Any]) -> str:
    size, groups = document["world_size"], document["groups"]
    where = f"{size} rank{'' if size == 1 else 's'}"
    if groups > 1:
        where += f" in {groups} groups of {size // groups} at once"
    return f"communication on {where}, {document['backend']} on {document['device']}: {document['exit_reason']}"


def _results(rows: Sequence[Mapping[str, Any]]) -> Table:
    measured = [row for row in rows if row["time_ms"] is not None]
    busiest = any(row["busiest_rank"] is not None for row in measured)
    columns = ["operation", "dtype", "", "size", "count", "iters", "mean ms", "min", "p50", "p95", "p99", "max"]
    columns += ["algbw GB/s", "busbw GB/s", *(["busiest"] if busiest else []), "wrong"]
    table = _table(*columns)
    for row in measured:
        ranks = [] if not busiest else ["" if row["busiest_rank"] is None else f"rank {row['busiest_rank']}"]
        table.add_row(
            row["operation"],
            row["dtype"] or "",
            _kind(row),
            _size(row),
            str(row["count"] or ""),
            str(row["iterations"]),
            *(_number(row["time_ms"][key]) for key in ("mean", "min", "p50", "p95", "p99", "max")),
            _number(row["algbw_gb_per_sec"]),
            _number(row["busbw_gb_per_sec"]),
            *ranks,
            "unchecked" if row["wrong"] is None else str(row["wrong"]),
        )
    return table


def _skipped(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    out = []
    for row in rows:
        if row["status"] == "skipped":
            words = (row["operation"], row["dtype"] or "", _kind(row))
            out.append(f"skipped: {' '.join(w for w in words if w)}: {row['reason']}")
    return list(dict.fromkeys(out))


def _fits(fits: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "fit of t = alpha + S/beta", "dtype", "", "alpha us", "+/-", "beta GB/s", "+/-", "off by, rms", "at most"
    )
    for fit in fits:
        table.add_row(
            fit["operation"],
            fit["dtype"],
            _kind(fit),
            _number(fit["alpha_s"] * 1e6),
            _number(None if fit["alpha_error_s"] is None else fit["alpha_error_s"] * 1e6),
            _number(fit["beta_gb_per_sec"]),
            _number(fit["beta_error_gb_per_sec"]),
            f"{fit['relative_error_rms']:.0%}",
            f"{fit['relative_error_max']:.0%}",
        )
    return table


def _kind(row: Mapping[str, Any]) -> str:
    operation, in_place = OPERATIONS.get(row["operation"]), row["in_place"]
    usual = operation is None or in_place in operation.placements[:1]
    placement = "" if usual or in_place is None else "in place" if in_place else "out of place"
    split = row["split"] if row["split"] == "uneven" else ""
    root = f"root {row['root']}" if row.get("root") else ""
    words = (row["reduction"] or "", placement, split, root)
    return " ".join(word for word in words if word)


def _size(row: Mapping[str, Any]) -> str:
    return size_text(row["size_bytes"]) if row["size_bytes"] else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _table(*columns: str) -> Table:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    words = {"operation", "fit of t = alpha + S/beta", "dtype", ""}
    for name in columns:
        table.add_column(name, justify="left" if name in words else "right", overflow="fold")
    return table


def _write(parts: Sequence[Any]) -> None:
    """On stdout in one piece; rich itself would leave the program where stdout's reader has gone."""
    from rich.console import Console  # noqa: PLC0415

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(captured.get().encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
