"""Training runs: throughput and scaling, where a step's time goes, what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtb_report.report import cells, scaling
from mtb_report.report.blocks import Block, Cell, Column, Section, Table
from mtb_report.report.naming import Named
from mtb_report.report.trainings import PARTS, interval, of_training
from mtb_report.results import Record

from .training_plots import plots_of

EFFICIENCY = (
    "Efficiency: strong scaling T1 / (n · Tn) where the global batch is that of the run on one rank; weak scaling, "
    "throughput per rank over that of one rank, where the batch per rank is. A strategy without a run on one rank is set "
    "against that of strategy single. T is the time of a step, n the number of ranks."
)
_RATE = "Tokens/s: valid tokens of the global batch; ± is half the 95% confidence interval over independent trials."
_ABOVE = (
    "An efficiency above 100%: a rank does less for each token than the run on one rank does (sharding spreads the work of "
    "the optimizer over ranks), or that run was slowed down by something else, noise included."
)
_TIMES = "Times are means over the measured steps of the maximum over ranks; memory is the maximum over ranks."
INVALID = "-: the run is not a valid measurement; its figures are in its file, and the reasons under Comparability."


def section(rows: Sequence[Named]) -> Section | None:
    """All of it."""
    runs = of_training(rows)
    if not runs:
        return None
    records = [row.record for row in runs]
    blocks: list[Block] = [*plots_of(runs)]
    blocks += [_throughput(runs, records), _step(runs), _communication(runs), _setup(runs)]
    return Section("training", "Training", blocks)


def with_interval(record: Record, figure: str, form: str) -> Cell:
    """``1,234 ± 5``, or the number alone where there is one trial."""
    cell = cells.of(record.values, figure, form)
    found = interval(record, figure)
    if found is None or cell.sort is None:
        return cell
    return Cell(f"{cell.text} ± {format((found[1] - found[0]) / 2, form)}", cell.sort)


def efficiency_cell(record: Record, records: Sequence[Record]) -> Cell:
    """``87.3% weak``, or why there is none."""
    found = scaling.efficiency(record, records)
    if found.value is None:
        return Cell(found.reason, None, "muted")
    return Cell(f"{found.value:.1%}{f' {found.kind}' if found.kind else ''}", found.value)


def _throughput(runs: Sequence[Named], records: Sequence[Record]) -> Table:
    columns = [
        Column("Run"),
        Column("Ranks", numeric=True),
        Column("Tokens/s", numeric=True),
        Column("per rank", numeric=True),
        Column("Step ms", numeric=True),
        Column("Efficiency", numeric=True),
        Column("Memory MiB", numeric=True),
        Column("Loss", numeric=True),
        Column("Outcome"),
        Column("Valid"),
    ]
    invalid = [r.performance_valid is False for r in records]
    notes = [] if all(invalid) else [EFFICIENCY, _RATE, _TIMES]
    shares = [scaling.efficiency(r, records).value or 0.0 for r in records if r.performance_valid is not False]
    notes += [_ABOVE] if max(shares, default=0.0) > 1 else []
    notes += [INVALID] if any(invalid) and not all(invalid) else []
    return Table("Throughput and scaling", columns, [_throughput_row(row, records) for row in runs], notes=notes)


def _throughput_row(row: Named, records: Sequence[Record]) -> list[Cell]:
    record = row.record
    ranks = record.get("world_size")
    return [
        cells.text(row.name),
        cells.number(ranks, "d"),
        cells.measured(record, lambda: with_interval(record, "tokens_per_sec", ",.0f")),
        cells.measured(
            record, lambda: cells.of(record.values, "tokens_per_sec", ",.0f", 1 / ranks) if ranks else cells.UNKNOWN
        ),
        cells.measured(record, lambda: with_interval(record, "step_time_ms", ",.2f")),
        cells.measured(record, lambda: efficiency_cell(record, records)),
        cells.measured(record, lambda: cells.of(record.values, "max_memory_mib", ",.0f")),
        cells.of(record.values, "loss", ".4f"),
        cells.status(record.get("exit_reason") or record.status),
        cells.yes_no(record.performance_valid, good=True),
    ]


def _step(runs: Sequence[Named]) -> Table:
    names = [*(name.capitalize() for name, _ in PARTS), "Whole step", "Checkpoint pause"]
    keys = [*(key for _, key in PARTS), "step_time_ms", "checkpoint_time_ms"]
    table_rows = [
        [
            cells.text(row.name),
            *(cells.measured(row.record, lambda k=key, r=row.record: cells.of(r.values, k, ",.3f")) for key in keys),  # type: ignore[misc]
        ]
        for row in runs
    ]
    note = "Milliseconds; forward and backward includes the synchronisation of gradients. A checkpoint's pause is not in the step."
    return Table(
        "Where a step's time goes", [Column("Run"), *(Column(n, numeric=True) for n in names)], table_rows, notes=[note]
    )


def _communication(runs: Sequence[Named]) -> Table:
    def listed(counts: Any, form: str) -> Cell:
        if not isinstance(counts, dict):
            return cells.UNKNOWN
        return Cell(
            ", ".join(f"{kind} {format(n, form)}" for kind, n in counts.items()) or "none", sum(counts.values())
        )

    rows = [
        [
            cells.text(row.name),
            listed(row.record.get("collectives_per_step"), ",d"),
            listed(row.record.get("comm_bytes_per_step"), ",d"),
            cells.measured(row.record, lambda r=row.record: cells.percent(r.get("mfu"))),  # type: ignore[misc]
            cells.text(row.record.get("flops_convention")),
            cells.of(row.record.values, "model_flops_per_token", ",.4g"),
        ]
        for row in runs
    ]
    columns = [
        Column("Run"),
        Column("Collectives a step"),
        Column("Bytes a step"),
        Column("MFU", numeric=True),
        Column("FLOPs convention"),
        Column("FLOPs a token", numeric=True),
    ]
    note = "Bytes are message sizes as nccl-tests defines them, on rank 0. MFU is unknown where the device's peak is."
    return Table("Communication and use of the device", columns, rows, notes=[note])


def _setup(runs: Sequence[Named]) -> Table:
    columns = [
        Column("Run"),
        Column("Parameters", numeric=True),
        Column("Sequence", numeric=True),
        Column("Batch per rank", numeric=True),
        Column("Micro-batches", numeric=True),
        Column("Global batch", numeric=True),
        Column("Sync"),
        Column("Precision"),
        Column("Reduced in"),
        Column("Recomputed"),
        Column("Steps", numeric=True),
        Column("Warm-up", numeric=True),
        Column("Device"),
    ]
    rows = []
    for row in runs:
        record = row.record
        asked, used = record.get("gradient_sync_mode"), record.get("resolved_gradient_sync_mode")
        rows.append(
            [
                cells.text(row.name),
                cells.of(record.values, "parameters", ",d"),
                cells.number(scaling.setting(record, "seq_length"), ",d"),
                cells.of(record.values, "batch_size_per_rank", ",d"),
                cells.of(record.values, "gradient_accumulation_steps", ",d"),
                cells.of(record.values, "global_batch_size", ",d"),
                cells.text(f"{asked} ({used})" if used and asked != used else asked),
                cells.text(record.get("precision")),
                cells.text(record.get("reduce_dtype")),
                cells.yes_no(record.get("activation_checkpointing")),
                cells.of(record.values, "steps", ",d"),
                cells.of(record.values, "warmup_steps", ",d"),
                cells.text(record.get("device_name") or record.get("device")),
            ]
        )
    return Table(
        "What was trained",
        columns,
        rows,
        notes=["Batches are in samples. Warm-up steps train, but are not in the averages."],
    )
