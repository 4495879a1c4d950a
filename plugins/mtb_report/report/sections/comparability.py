"""What keeps rows from being compared: different work or machines in one table, and measurements that are not valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mtb_report.report import scaling
from mtb_report.report.blocks import Block, Cell, Column, Listing, Section, Table, Text
from mtb_report.report.cells import plural
from mtb_report.report.naming import Named
from mtb_report.report.trainings import MEMORY_SPREAD, interval, memory_spread
from mtb_report.results import Record

_DOES_NOT_APPLY = object()
_PERFORMANCE_KINDS = ("training", "memory_pressure", "communication", "moe_routing", "megatron", "profile")


def _cuda(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = record.environment.get("cuda") or {}
    return found


def _between_ranks(record: Record, name: str) -> Any:
    """What one rank has none of."""
    return _DOES_NOT_APPLY if record.get("world_size") == 1 else record.get(name)


#: What must be alike for times to mean the same, and how it is found.
_ASPECTS: tuple[tuple[str, Callable[[Record], Any]], ...] = (
    ("device", lambda r: r.get("device_name") or r.environment.get("cpu_model") or r.get("device")),
    ("torch", lambda r: r.environment.get("torch")),
    ("NCCL", lambda r: _cuda(r).get("nccl")),
    ("driver", lambda r: _cuda(r).get("driver")),
    ("backend", lambda r: _between_ranks(r, "backend")),
    ("revision", lambda r: (r.provenance.get("git_revision") or "")[:12] or None),
)
_OF_TRAINING: tuple[tuple[str, Callable[[Record], Any]], ...] = (
    ("parameters", lambda r: r.get("parameters")),
    ("sequence length", lambda r: scaling.setting(r, "seq_length")),
    ("precision", lambda r: r.get("precision")),
    ("reduce dtype", lambda r: _between_ranks(r, "reduce_dtype")),
    ("measured steps", lambda r: r.get("steps")),
    ("recomputation", lambda r: r.get("activation_checkpointing")),
)


def section(rows: Sequence[Named]) -> Section | None:
    """Warnings; None where there is nothing to warn of."""
    measured = [row for row in rows if row.record.kind in _PERFORMANCE_KINDS]
    blocks: list[Block] = []
    found = [*_differences(measured), *_gaps(measured, _compared(rows))]
    if found:
        blocks += [
            Text("Before rows of one table are set side by side:"),
            Listing(found),
        ]
    invalid = [row for row in rows if row.record.performance_valid is False]
    if invalid:
        blocks.append(_invalid(invalid))
    return Section("comparability", "Comparability", blocks) if blocks else None


def _differences(rows: Sequence[Named]) -> list[str]:
    training = [row for row in rows if row.record.kind == "training"]
    return [*_of(rows, _ASPECTS, "Results"), *_of(training, _OF_TRAINING, "Training runs")]


def _of(rows: Sequence[Named], aspects: Sequence[tuple[str, Callable[[Record], Any]]], what: str) -> list[str]:
    out = []
    for name, of in aspects:
        counts: dict[str, int] = {}
        for row in rows:
            value = of(row.record)
            if value is _DOES_NOT_APPLY:
                continue
            shown = _shown(value)
            counts[shown] = counts.get(shown, 0) + 1
        if len(counts) > 1:
            out.append(f"{what} differ in {name}: {'; '.join(f'{v} ({n})' for v, n in counts.items())}")
    return out


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _compared(rows: Sequence[Named]) -> set[str]:
    """The digests of results that are one of several trials of a comparison, which knows their noise."""
    sides = [row.record.get(side) for row in rows if row.record.kind == "comparison" for side in ("a", "b")]
    files = [side["files"] for side in sides if isinstance(side, dict) and isinstance(side.get("files"), list)]
    return {str(file["digest"]) for of in files if len(of) > 1 for file in of if isinstance(file, dict)}


def _gaps(rows: Sequence[Named], compared: set[str]) -> list[str]:
    out = []
    unknown = sum(row.record.performance_valid is None for row in rows)
    if unknown:
        out.append(f"{plural(unknown, 'result')} of {len(rows)} do not say whether the measurement was valid")
    dirty = sum(row.record.provenance.get("git_dirty") is True for row in rows)
    if dirty:
        out.append(f"{plural(dirty, 'result')} of {len(rows)} were made from a working tree with changes")
    incomplete = sum(row.record.provenance.get("complete") is not True for row in rows)
    if incomplete:
        out.append(f"{plural(incomplete, 'result')} of {len(rows)} lack part of their provenance")
    broken = sum(bool(row.record.get("loss_nonfinite") or row.record.get("loss_first_nonfinite")) for row in rows)
    if broken:
        out.append(
            f"The loss of {plural(broken, 'training run')} was not finite: the speed of a broken training tells nothing"
        )
    uneven = sum(memory_spread(row.record) is not None for row in rows if row.record.kind == "training")
    if uneven:
        out.append(
            f"The peak memory of {plural(uneven, 'training run')} differs by more than {MEMORY_SPREAD:.0%} between trials: its "
            "mean, and what is saved of it, mean little"
        )
    timed = [row.record for row in rows if row.record.kind == "training" and row.record.get("tokens_per_sec")]
    once = sum(interval(r, "tokens_per_sec") is None and r.digest not in compared for r in timed)
    if once:
        out.append(
            f"The noise of {plural(once, 'training run')} is not known: there is one trial, or not the figures of several"
        )
    return out


def _invalid(rows: Sequence[Named]) -> Table:
    return Table(
        "Not valid as measurements of performance",
        [Column("Result"), Column("Kind"), Column("Reasons")],
        [
            [
                Cell(row.name, row.name),
                Cell(row.record.kind, row.record.kind),
                Cell("; ".join(row.record.performance_invalid_reasons) or "no reason given"),
            ]
            for row in rows
        ],
        notes=[
            "In the other tables these rows have - in every column of performance: time, throughput, bandwidth, memory.",
            "Columns without any other value are left out. Raw values: in each result's file (result.json of a run's folder).",
        ],
    )
