"""Routing of tokens to experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtb_report.report import cells
from mtb_report.report.blocks import Cell, Column, Plot, Section, Series, Table
from mtb_report.report.naming import Named
from mtb_report.results import Record

_PHASES = (
    "gate",
    "permute",
    "count_exchange",
    "dispatch",
    "expert",
    "combine",
    "unpermute",
    "combine_backward",
    "dispatch_backward",
    "backward",
)


def section(rows: Sequence[Named]) -> Section | None:
    """One row for each point, and tokens of each expert where there is a single point."""
    documents = [row for row in rows if row.record.kind == "moe_routing"]
    if not documents:
        return None
    points = [pair for row in documents for pair in _points(row)]
    experts = [plot for row, point in points if (plot := _experts(row, point)) is not None]
    return Section("moe", "Mixture of experts", [_routing(points), _times(points), *experts[:4]])


def _points(row: Named) -> list[tuple[Named, Mapping[str, Any]]]:
    """The points of a document, each under a name of its own."""
    points = row.record.rows or [row.record.values]
    several = len(points) > 1
    return [(Named(f"{row.name} #{n}", row.record) if several else row, point) for n, point in enumerate(points, 1)]


def _routing(points: Sequence[tuple[Named, Mapping[str, Any]]]) -> Table:
    out = []
    for row, point in points:
        dropped, slots = point.get("dropped_slots"), point.get("slots")
        rate = point.get("drop_rate")
        out.append(
            [
                cells.text(row.name),
                cells.text(point.get("world_size") or row.record.get("world_size")),
                cells.text(point.get("num_experts")),
                cells.text(point.get("top_k")),
                _capacity(point),
                cells.of(point, "zipf_s", "g"),
                cells.of(point, "total_tokens", ",d"),
                cells.number(
                    rate if rate is not None else dropped / slots if dropped is not None and slots else None, ".1%"
                ),
                cells.of(point, "dropped_tokens" if "dropped_tokens" in point else "tokens_dropped", ",d"),
                cells.of(point, "load_imbalance_ratio", ".3f"),
                cells.number(point.get("padding_waste"), ".1%"),
                cells.of(point, "load_balance_loss", ".4f"),
                cells.status(point.get("status")),
            ]
        )
    titles = [
        "Document",
        "Ranks",
        "Experts",
        "Top-k",
        "Capacity factor",
        "Zipf s",
        "Tokens",
        "Slots dropped",
        "Tokens lost",
        "Imbalance",
        "Padding",
        "Balance loss",
        "Check",
    ]
    note = (
        "A slot is a token's claim on one expert; imbalance is the fullest expert's tokens over the mean; padding is the share "
        "that fixed shapes would send and compute in vain."
    )
    return Table("Routing", [Column(t, numeric=t not in ("Document", "Check")) for t in titles], out, notes=[note])


def _capacity(point: Mapping[str, Any]) -> Cell:
    if "capacity_factor" in point and point["capacity_factor"] is None:
        return Cell("dropless", None)
    return cells.of(point, "capacity_factor", "g")


def _times(points: Sequence[tuple[Named, Mapping[str, Any]]]) -> Table:
    def phase(record: Record, point: Mapping[str, Any], name: str) -> Cell:
        times = point.get("time_ms")
        mean = (times.get(name) or {}).get("mean") if isinstance(times, Mapping) else point.get(f"{name}_time_ms")
        return cells.measured(record, lambda: cells.number(mean, ",.3f"))

    out = [
        [
            cells.text(row.name),
            *(phase(row.record, point, name) for name in (*_PHASES, "iteration")),
            cells.measured(row.record, lambda p=point: cells.number(p.get("communication_share"), ".1%")),  # type: ignore[misc]
            cells.of(point, "communication_bytes", ",d"),
            cells.measured(row.record, lambda p=point: cells.of(p, "tokens_per_sec", ",.0f")),  # type: ignore[misc]
        ]
        for row, point in points
    ]
    titles = [
        "Document",
        *(name.replace("_", " ") for name in _PHASES),
        "forward and backward",
        "Communication",
        "Bytes",
        "Tokens/s",
    ]
    note = "Milliseconds, means over iterations of the maximum over ranks. Communication: its share of the time, waiting included."
    return Table("Time by phase", [Column(t, numeric=t != "Document") for t in titles], out, notes=[note])


def _experts(row: Named, point: Mapping[str, Any]) -> Plot | None:
    counts = point.get("expert_token_counts")
    if not counts or len(counts) > 64 or len(row.record.rows) > 1:
        return None
    asked = point.get("requested_counts") or counts
    refused = [max(a - c, 0) for a, c in zip(asked, counts, strict=False)]
    series = [Series("taken", (), counts), *([Series("asked for, not taken", (), refused)] if any(refused) else [])]
    return Plot(
        f"Tokens of each expert: {row.name}",
        "Tokens that each expert took, and those that asked for it in vain; even bars are balanced.",
        "bars",
        "tokens",
        "",
        series,
        labels=[f"expert {n}" for n in range(len(counts))],
    )
