"""Runs of Megatron-LM, and the matrices they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_report.report import cells
from mtb_report.report.blocks import Block, Column, Section, Table
from mtb_report.report.naming import Named


def section(rows: Sequence[Named]) -> Section | None:
    """A table of configurations and one of matrices."""
    runs = [row for row in rows if row.record.kind == "megatron"]
    matrices = [row for row in rows if row.record.kind == "megatron_matrix"]
    if not runs and not matrices:
        return None
    blocks: list[Block] = []
    if runs:
        blocks.append(_runs(runs))
    if matrices:
        blocks.append(_matrices(matrices))
    return Section("megatron", "Megatron", blocks)


def _runs(rows: Sequence[Named]) -> Table:
    out = []
    sources = set()
    for row in rows:
        record = row.record
        runtime = record.get("runtime") or {}
        sources.add(str(runtime.get("pipeline_bubble_proxy_source") or "unknown").replace("_", " "))
        out.append(
            [
                cells.text(row.name),
                *(cells.text(record.get(name)) for name in ("tp", "pp", "dp")),
                cells.text(record.get("precision")),
                cells.measured(record, lambda r=record: cells.of(r.values, "tokens_per_sec", ",.0f")),  # type: ignore[misc]
                cells.measured(record, lambda r=record: cells.of(r.values, "step_time_ms", ",.2f")),  # type: ignore[misc]
                cells.measured(record, lambda r=record: cells.of(r.values, "max_memory_mib", ",.0f")),  # type: ignore[misc]
                cells.percent(runtime.get("pipeline_bubble_proxy")),
                cells.text((record.get("megatron") or {}).get("core_version")),
                cells.status(record.status),
                cells.yes_no(record.performance_valid, good=True),
            ]
        )
    titles = [
        "Configuration",
        "TP",
        "PP",
        "DP",
        "Precision",
        "Tokens/s",
        "Step ms",
        "Memory MiB",
        "Pipeline bubble",
        "Megatron Core",
        "Status",
        "Valid",
    ]
    text = {"Configuration", "Precision", "Megatron Core", "Status", "Valid"}
    notes = [
        "TP, PP, DP: ranks that split tensors, layers and data. Memory is all that was in use on the device, others' too.",
        f"Pipeline bubble, where it comes from: {', '.join(sorted(sources))}.",
    ]
    return Table("Configurations", [Column(t, numeric=t not in text) for t in titles], out, notes=notes)


def _matrices(rows: Sequence[Named]) -> Table:
    out = [
        [
            cells.text(row.name),
            cells.text(row.record.get("expected_config_count")),
            cells.text(row.record.get("successful_config_count")),
            cells.yes_no(row.record.execution_complete, good=True),
            cells.yes_no(row.record.performance_valid, good=True),
            cells.text(", ".join(f"{r.get('name')}: {r.get('status')}" for r in row.record.rows)),
        ]
        for row in rows
    ]
    titles = ["Matrix", "Planned", "Succeeded", "Complete", "Valid", "Configurations"]
    return Table("Matrices", [Column(t, numeric=t in ("Planned", "Succeeded")) for t in titles], out)
