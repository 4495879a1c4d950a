"""Analyses of traces: where each rank's time went, and who was waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtb_report.report import cells
from mtb_report.report.blocks import Block, Cell, Column, Listing, Plot, Section, Series, Table, Text
from mtb_report.report.naming import Named

_PARTS = (
    ("compute", "compute_us"),
    ("exposed communication", "exposed_us"),
    ("memory", "memory_us"),
    ("idle", "idle_us"),
)
#: Bars of a timeline; more cannot be told apart.
_MOST_BARS = 64
_MOST_OPERATORS = 10


def section(rows: Sequence[Named]) -> Section | None:
    """For every trace analysis, alone or inside a profiled run: a bar timeline, the breakdown, collectives, verdict."""
    found = [(row, document) for row in rows if (document := _analysis(row)) is not None]
    if not found:
        return None
    blocks: list[Block] = [
        Text("Times under a profiler are longer than those of a training; the shares are what counts.")
    ]
    for row, document in found:
        blocks += _of_one(row.name, document)
    return Section("profile", "Profile", blocks)


def _analysis(row: Named) -> Mapping[str, Any] | None:
    if row.record.kind == "trace_analysis":
        return row.record.raw
    found = row.record.get("profile")
    return found if isinstance(found, Mapping) else None


def _of_one(name: str, document: Mapping[str, Any]) -> list[Block]:
    ranks = [rank for rank in document.get("ranks") or () if isinstance(rank, Mapping)]
    blocks: list[Block] = []
    verdict = document.get("verdict")
    if verdict is not None:
        blocks.append(Text(f"{name}: {str(document.get('verdict_text') or verdict).rstrip('.')}."))
        said = [*(document.get("evidence") or ()), *(f"To try: {advice}" for advice in document.get("advice") or ())]
        if said:
            blocks.append(Listing(said))
    timeline = _timeline(name, ranks)
    blocks += [*([timeline] if timeline else []), _breakdown(name, ranks)]
    blocks += [
        table
        for table in (
            _collectives(name, ranks),
            _stragglers(name, document),
            _losses(name, document),
            _operators(name, document),
        )
        if table is not None
    ]
    return blocks


def _timeline(name: str, ranks: Sequence[Mapping[str, Any]]) -> Plot | None:
    """One bar for each rank and step: steps of one number lie together, so that ranks can be compared."""
    bars = [(step.get("step"), rank.get("rank"), step) for rank in ranks for step in rank.get("steps") or ()]
    bars.sort(key=lambda bar: (bar[0] is None, bar[0] or 0, bar[1] or 0))
    label = "step {} · rank {}"
    if not bars:
        bars = [("", rank.get("rank"), rank) for rank in ranks]
        label = "{}rank {}"
    bars = [bar for bar in bars if all(bar[2].get(key) is not None for _, key in _PARTS)]
    if not bars:
        return None
    shown = bars[:_MOST_BARS]
    return Plot(
        f"Timeline of {name}",
        "Milliseconds of each step on each rank, parts put side by side and not in their order in time; they add up to the span."
        + (f" The first {_MOST_BARS} of {len(bars)} bars." if len(bars) > _MOST_BARS else ""),
        "bars",
        "ms",
        "",
        [Series(part, (), [bar[2][key] / 1e3 for bar in shown]) for part, key in _PARTS],
        labels=[label.format(step, rank) for step, rank, _ in shown],
    )


def _breakdown(name: str, ranks: Sequence[Mapping[str, Any]]) -> Table:
    keys = (
        "span_us",
        "compute_us",
        "communication_us",
        "overlapped_us",
        "exposed_us",
        "memory_us",
        "idle_us",
        "waiting_us",
    )
    out = [
        [
            cells.text(f"rank {rank.get('rank', 'unknown')}"),
            cells.text(rank.get("window")),
            *(cells.of(rank, key, ",.3f", 1e-3) for key in keys),
            *(_share(rank, key) for key in ("compute_us", "exposed_us", "idle_us")),
        ]
        for rank in ranks
    ]
    titles = [
        "Rank",
        "Window",
        "Span",
        "Compute",
        "Communication",
        "Overlapped",
        "Exposed",
        "Memory",
        "Idle",
        "Waiting",
        "Compute %",
        "Exposed %",
        "Idle %",
    ]
    note = "Milliseconds. Span = compute + exposed + memory + idle; exposed communication is what no computation hides; waiting is for other ranks."
    return Table(
        f"Breakdown of {name}", [Column(t, numeric=t not in ("Rank", "Window")) for t in titles], out, notes=[note]
    )


def _share(rank: Mapping[str, Any], key: str) -> Cell:
    part, span = rank.get(key), rank.get("span_us")
    return cells.percent(part / span if part is not None and span else None)


def _collectives(name: str, ranks: Sequence[Mapping[str, Any]]) -> Table | None:
    out = [
        [
            cells.text(f"rank {rank.get('rank', 'unknown')}"),
            cells.text(row.get("operation")),
            cells.text(row.get("dtype")),
            cells.of(row, "count", ",d"),
            cells.of(row, "bytes", ",d"),
            cells.of(row, "time_us", ",.3f", 1e-3),
            cells.of(row, "transfer_us", ",.3f", 1e-3),
            cells.of(row, "busbw_gb_per_sec", "sig"),
        ]
        for rank in ranks
        for row in rank.get("collectives") or ()
    ]
    if not out:
        return None
    titles = ["Rank", "Operation", "Dtype", "Count", "Bytes", "Time ms", "Transfer ms", "busbw GB/s"]
    return Table(
        f"Collectives of {name}",
        [Column(t, numeric=t not in ("Rank", "Operation", "Dtype")) for t in titles],
        out,
        notes=["Transfer is the time from when the last rank had arrived."],
    )


def _stragglers(name: str, document: Mapping[str, Any]) -> Table | None:
    out = [
        [
            cells.text(f"rank {row.get('rank', 'unknown')}"),
            cells.text(row.get("phase")),
            cells.of(row, "excess_us", ",.3f", 1e-3),
            cells.percent(row.get("share_of_step")),
            cells.text(f"{row.get('slower_steps')} of {row.get('steps')}"),
        ]
        for row in document.get("stragglers") or ()
    ]
    if not out:
        return None
    titles = ["Rank", "Phase", "Excess ms a step", "Of the step", "Slower steps"]
    return Table(
        f"Stragglers of {name}",
        [Column(t, numeric=t.startswith(("Excess", "Of"))) for t in titles],
        out,
        notes=["By time of its own, not by time in collectives."],
    )


def _losses(name: str, document: Mapping[str, Any]) -> Table | None:
    found = document.get("mfu")
    if not isinstance(found, Mapping) or not found.get("losses"):
        return None
    out = [
        [
            cells.text(str(loss.get("name")).replace("_", " ")),
            cells.of(loss, "ms", ",.3f"),
            cells.of(loss, "points", ".2f"),
            cells.text(loss.get("normal")),
            cells.yes_no(loss.get("unusual"), good=False),
            Cell(str(loss["note"])) if loss.get("note") else Cell("none", None, "muted"),
        ]
        for loss in found["losses"]
        if isinstance(loss, Mapping)
    ]
    heads = ["Loss", "ms", "Points of MFU", "Normal", "Unusual", "Note"]
    columns = [Column(head, numeric=head in ("ms", "Points of MFU")) for head in heads]
    ideal, measured = (cells.of(found, key, ",.3f").text for key in ("ideal_ms", "measured_ms"))
    note = f"The ideal step takes {ideal} ms, the measured one {measured} ms; the losses lead from one to the other."
    return Table(f"From the ideal step to the measured one: {name}", columns, out, notes=[note])


def _operators(name: str, document: Mapping[str, Any]) -> Table | None:
    rows = [row for row in document.get("operators") or () if isinstance(row, Mapping)][:_MOST_OPERATORS]
    if not rows:
        return None
    heads = [key for key in rows[0] if key != "name"]
    out = [
        [
            cells.text(row.get("name")),
            *(
                cells.text(row.get(key)) if not isinstance(row.get(key), float) else cells.of(row, key, ",.1f")
                for key in heads
            ),
        ]
        for row in rows
    ]
    return Table(
        f"Top operators of {name}",
        [Column("Operator"), *(Column(h.replace("_", " "), numeric=True) for h in heads)],
        out,
    )
