"""What went wrong: drills, runs that did not end as planned; and memory pressure, tier by tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtb_report.report import cells
from mtb_report.report.blocks import Block, Cell, Column, Plot, Section, Series, Table
from mtb_report.report.naming import Named


def section(rows: Sequence[Named]) -> Section | None:
    """Failure handling."""
    made = (_drills(rows), _ended_early(rows))
    blocks: list[Block] = [table for table in made if table is not None]
    return Section("failures", "Failure handling", blocks) if blocks else None


def _drills(rows: Sequence[Named]) -> Table | None:
    out = []
    for row in rows:
        if row.record.kind != "fault_tolerance":
            continue
        verified = (row.record.get("verification") or {}).get("exact_match")
        out += [
            [
                cells.text(row.name),
                cells.text(case.get("failure_type")),
                cells.text(case.get("crash_rank")),
                cells.text(case.get("crash_at_step")),
                cells.text(case.get("detection")),
                cells.text(case.get("launcher_returncode")),
                cells.text(case.get("recovery_mode")),
                cells.yes_no(case.get("auto_recovered")),
                cells.yes_no(case.get("checkpoint_unchanged"), good=True),
                cells.yes_no(verified, good=True),
                cells.status(case.get("status")),
            ]
            for case in row.record.rows
        ]
    if not out:
        return None
    titles = [
        "Drill",
        "Failure",
        "Rank",
        "At step",
        "Detected by",
        "Exit code",
        "Recovery",
        "By itself",
        "Checkpoint unharmed",
        "Resumed exactly",
        "Outcome",
    ]
    return Table("Failure drills", [Column(t, numeric=t in ("Rank", "At step", "Exit code")) for t in titles], out)


def _ended_early(rows: Sequence[Named]) -> Table | None:
    out = []
    for row in rows:
        reason = row.record.get("exit_reason")
        if reason in (None, "done"):
            continue
        failure: dict[str, Any] = row.record.get("failure") or {}
        out.append(
            [
                cells.text(row.name),
                cells.text(row.record.kind),
                cells.status(reason),
                cells.text(failure.get("rank")),
                cells.text(failure.get("step")),
                cells.text(failure.get("text") or failure.get("message")),
            ]
        )
    if not out:
        return None
    columns = [Column(t, numeric=t in ("Rank", "Step")) for t in ("Run", "Kind", "End", "Rank", "Step", "First cause")]
    return Table("Ended early", columns, out)


def pressure(rows: Sequence[Named]) -> Section | None:
    """Memory pressure per tier; rows that ran out of memory are kept."""
    found = [row for row in rows if row.record.kind == "memory_pressure"]
    if not found:
        return None
    tiers: dict[str, list[Named]] = {}
    for row in found:
        tiers.setdefault(str(row.record.get("tier") or "unknown"), []).append(row)
    ordered = sorted(tiers.items(), key=lambda item: _least_parameters(item[1]))
    blocks: list[Block] = [_tier(name, group) for name, group in ordered]
    plot = _plot([row for _, group in ordered for row in group])
    return Section("pressure", "Memory pressure", [*([plot] if plot else []), *blocks])


def _least_parameters(rows: Sequence[Named]) -> float:
    known = [row.record.get("parameters") for row in rows if row.record.get("parameters")]
    return min(known, default=float("inf"))


def _tier(name: str, rows: Sequence[Named]) -> Table:
    out = [
        [
            cells.text(row.name),
            cells.number(row.record.get("world_size"), "d"),
            cells.of(row.record.values, "parameters", ",d"),
            cells.status(row.record.status),
            cells.measured(row.record, lambda r=row.record: cells.of(r.values, "max_memory_mib", ",.0f")),  # type: ignore[misc]
            cells.measured(row.record, lambda r=row.record: cells.of(r.values, "step_time_ms", ",.2f")),  # type: ignore[misc]
            cells.measured(row.record, lambda r=row.record: cells.of(r.values, "tokens_per_sec", ",.0f")),  # type: ignore[misc]
            _failure(row),
        ]
        for row in rows
    ]
    titles = ["Run", "Ranks", "Parameters", "Status", "Memory MiB", "Step ms", "Tokens/s", "Failure"]
    return Table(f"Tier {name}", [Column(t, numeric=t not in ("Run", "Status", "Failure")) for t in titles], out)


def _failure(row: Named) -> Cell:
    if row.record.status == "success":
        return Cell("none", "", "muted")
    said = [row.record.get("failure_type"), row.record.get("failure_reason")]
    return cells.text(": ".join(str(part) for part in said if part))


def _plot(rows: Sequence[Named]) -> Plot | None:
    known = [r for r in rows if r.record.performance_valid is not False and r.record.get("max_memory_mib")]
    if not known:
        return None
    missing = len(rows) - len(known)
    return Plot(
        "Memory by tier and strategy",
        "Peak MiB on the fullest rank."
        + (f" {missing} of {len(rows)} runs have no figure: see the tables." if missing else ""),
        "bars",
        "MiB",
        "",
        [Series("peak memory", (), [row.record.get("max_memory_mib") for row in known])],
        labels=[row.name for row in known],
    )
