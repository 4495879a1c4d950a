"""From results to a report: every section that has something to say, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from mtb_report.results import Found, Record

from .blocks import Block, Cell, Column, Fact, Report, Section, Table, Text
from .cells import NOT_VALID, plural
from .naming import Named, named
from .scaling import work_of
from .sections import (
    checks,
    communication,
    comparability,
    comparisons,
    environment,
    failures,
    megatron,
    moe,
    profile,
    runs,
    sweeps,
    training,
)
from .soundness import sound

Maker = Callable[[Sequence[Named]], Section | None]

_SECTIONS: tuple[Maker, ...] = (
    comparability.section,
    sweeps.section,
    training.section,
    runs.trials,
    runs.sharding,
    comparisons.section,
    failures.pressure,
    megatron.section,
    communication.section,
    moe.section,
    checks.tensor_parallel,
    profile.section,
    runs.stability,
    runs.state,
    failures.section,
    checks.verification,
    checks.conformance,
    environment.section,
)

#: Kinds that a section shows; others are listed at the end.
_KINDS = {
    "training",
    "profile",
    "trace_analysis",
    "communication",
    "moe_routing",
    "tensor_parallel",
    "tensor_parallel_mlp",
    "sequence_parallel",
    "checkpoint_verification",
    "fault_tolerance",
    "memory_pressure",
    "megatron",
    "megatron_matrix",
    "conformance",
    "sweep",
    "comparison",
}


def build(found: Found, title: str) -> Report:
    """The report of all that was found; a section without content is left out."""
    found = sound(found, _alone)
    rows = named(found.records)
    sections = _sections(rows)
    rest = _files(rows, found.unreadable)
    return Report(title, _facts(found.records), [*sections, *([rest] if rest else [])])


def _sections(rows: Sequence[Named]) -> list[Section]:
    made = [section for make in _SECTIONS if (section := make(rows)) is not None]
    return [attrs.evolve(section, blocks=[_without_dashes(block) for block in section.blocks]) for section in made]


def _without_dashes(block: Block) -> Block:
    """A table without the columns in which no row has a valid measurement, and a note that names them."""
    if not isinstance(block, Table) or not block.rows:
        return block
    left_out = [i for i in range(len(block.columns)) if all(row[i] is NOT_VALID for row in block.rows)]
    if not left_out:
        return block
    titles = ", ".join(block.columns[i].title for i in left_out)
    note = f"no row is a valid measurement (see Comparability), so these columns are left out: {titles}."
    if len(left_out) >= len(block.columns) - 1:
        return Text(f"{block.caption}: {note}")
    kept = [i for i in range(len(block.columns)) if i not in left_out]
    return Table(
        block.caption,
        [block.columns[i] for i in kept],
        [[row[i] for i in kept] for row in block.rows],
        notes=[*block.notes, note[0].upper() + note[1:]],
    )


def _alone(record: Record) -> None:
    """Make everything that a report of this record alone would hold."""
    _sections(named([record]))


def _facts(records: Sequence[Record]) -> list[Fact]:
    valid = sum(record.performance_valid is True for record in records)
    invalid = sum(record.performance_valid is False for record in records)
    bad = [record for record in records if record.status not in (None, "success")]
    facts = [
        Fact(f"{len(records):,}", "result" if len(records) == 1 else "results"),
        Fact(f"{valid:,}", "valid measurements"),
        Fact(f"{invalid:,}", "not valid as measurements", "warn" if invalid else ""),
        Fact(f"{len(bad):,}", "did not succeed", "bad" if bad else ""),
    ]
    trained = [r for r in records if r.kind == "training" and r.status in (None, "success")]
    fast = [r for r in trained if r.performance_valid is not False and r.get("tokens_per_sec")]
    if fast and len({work_of(r) for r in fast}) == 1:  # of models of several sizes the smallest would be the fastest
        best = max(fast, key=lambda record: record.get("tokens_per_sec"))
        facts.append(Fact(f"{best.get('tokens_per_sec'):,.0f}", f"most tokens/s: {best.label}"))
    return facts


def _files(rows: Sequence[Named], unreadable: Sequence[tuple[Path, str]]) -> Section | None:
    other = [row for row in rows if row.record.kind not in _KINDS]
    listed = [
        [Cell(row.record.path.name, code=True), Cell(f"kind '{row.record.kind}' has no section")] for row in other
    ]
    listed += [[Cell(path.name, code=True), Cell(reason, tone="bad")] for path, reason in unreadable]
    if not listed:
        return None
    columns = [Column("File"), Column("Why")]
    table = Table(f"{plural(len(listed), 'file')} without a section", columns, listed)
    return Section("files", "Files not shown", [table])
