"""Comparisons of two runs: ratio, interval, verdict, and what was unlike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtb_report.compare.metrics import METRICS
from mtb_report.compare.unlike import shown
from mtb_report.report import cells
from mtb_report.report.blocks import Block, Cell, Column, Listing, Section, Table
from mtb_report.report.naming import Named


def section(rows: Sequence[Named]) -> Section | None:
    """One row for each comparison; its warnings and differences below."""
    found = [row for row in rows if row.record.kind == "comparison"]
    if not found:
        return None
    out = []
    said: list[str] = []
    for row in found:
        values = row.record.values
        a, b = _side(values, "a"), _side(values, "b")
        low, high = values.get("ratio_interval") or (None, None)
        n = values.get("n") or (None, None)
        seen = values.get("seen_from_percent")
        out.append(
            [
                cells.text(row.name),
                cells.text(a.get("label")),
                cells.text(b.get("label")),
                cells.text(values.get("metric")),
                _unless_invalid(a, b, _mean(values.get("metric"), a)),
                _unless_invalid(a, b, _mean(values.get("metric"), b)),
                _unless_invalid(a, b, cells.number(values.get("ratio"), ".4f")),
                _unless_invalid(a, b, cells.number(low, ".4f")),
                _unless_invalid(a, b, cells.number(high, ".4f")),
                _unless_invalid(a, b, cells.percent(None if seen is None else seen / 100)),
                cells.text(f"{n[0]} and {n[1]}"),
                _verdict(a, b, values),
            ]
        )
        said += [f"{row.name}: {text}" for text in (*_texts(values, "warnings"), *_texts(values, "notes"))]
        unlike = [d for d in values.get("differences") or () if isinstance(d, Mapping)]
        said += [f"{row.name}: {d.get('name')} differs: {shown(d.get('a'))} and {shown(d.get('b'))}" for d in unlike]
    titles = [
        "Comparison",
        "A",
        "B",
        "Figure",
        "Mean of A",
        "Mean of B",
        "Ratio",
        "CI low",
        "CI high",
        "Seen from",
        "Trials",
        "Verdict",
    ]
    numeric = {"Mean of A", "Mean of B", "Ratio", "CI low", "CI high", "Seen from"}
    notes = [
        "Means are ± the standard deviation of the trials. Seen from: the smallest effect that these trials would show.",
        "Ratio: speed of B over speed of A, above 1 is faster; of memory, that of B over that of A.",
    ]
    blocks: list[Block] = [Table("B against A", [Column(t, numeric=t in numeric) for t in titles], out, notes=notes)]
    return Section("comparisons", "Comparisons", [*blocks, *([Listing(said)] if said else [])])


def _side(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _mean(metric: Any, side: Mapping[str, Any]) -> Cell:
    mean, std = side.get("mean"), side.get("std")
    if metric not in METRICS or mean is None:
        return cells.UNKNOWN
    return Cell(METRICS[metric].shown(mean, std), mean)


def _unless_invalid(a: Mapping[str, Any], b: Mapping[str, Any], cell: Cell) -> Cell:
    return cells.NOT_VALID if False in (a.get("performance_valid"), b.get("performance_valid")) else cell


def _verdict(a: Mapping[str, Any], b: Mapping[str, Any], values: Mapping[str, Any]) -> Cell:
    said = cells.text(values.get("verdict"))
    if _unless_invalid(a, b, said) is cells.NOT_VALID:
        return Cell(f"not valid: {said.text}", None, "warn")
    return said


def _texts(values: Mapping[str, Any], name: str) -> list[str]:
    return [str(text) for text in values.get(name) or ()]
