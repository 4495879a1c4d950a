"""Training runs: throughput and scaling, where a step's time goes, what was trained, and their plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mtb_core import summarize
from mtb_report.report import cells, scaling
from mtb_report.report.blocks import Block, Cell, Column, Plot, Section, Series, Table
from mtb_report.report.naming import Named
from mtb_report.results import Record, metrics_of

#: More curves than this in one plot cannot be told apart.
_MOST_CURVES = 12
_PARTS = (("data", "data_time_ms"), ("forward and backward", "forward_backward_ms"), ("optimizer", "optimizer_step_ms"))

EFFICIENCY = (
    "Efficiency: strong scaling T1 / (n · Tn) where the global batch is that of the run on one rank; weak scaling, "
    "throughput per rank over that of one rank, where the batch per rank is. T is the time of a step, n the number of ranks."
)
_RATE = "Tokens/s: valid tokens of the global batch; ± is half the 95% confidence interval over independent trials."
_TIMES = "Times are means over the measured steps of the maximum over ranks; memory is the maximum over ranks."
INVALID = "-: the run is not a valid measurement; its raw figures are in its file, the reasons below Comparability."


def of_training(rows: Sequence[Named]) -> list[Named]:
    """The training runs among `rows`: by work and strategy in the order in which they appear, then by ranks.

    A run whose number of ranks is not known stays where it was found among its like.
    """
    runs = [row for row in rows if row.record.kind == "training"]
    groups: dict[Any, list[Named]] = {}
    for row in runs:
        key = (scaling.batch_folder(row.record), scaling.work_of(row.record), scaling.scheme_of(row.record))
        groups.setdefault(key, []).append(row)
    return [row for group in groups.values() for row in _by_ranks(group)]


def _by_ranks(group: list[Named]) -> list[Named]:
    if any(row.record.get("world_size") is None for row in group):
        return group
    return sorted(group, key=lambda row: row.record.get("world_size"))


def section(rows: Sequence[Named]) -> Section | None:
    """All of it."""
    runs = of_training(rows)
    if not runs:
        return None
    records = [row.record for row in runs]
    plots = (
        _rate_plot(runs),
        _efficiency_plot(runs, records),
        _frontier_plot(runs),
        _loss_plot(runs),
        _breakdown_plot(runs),
    )
    blocks: list[Block] = [plot for plot in plots if plot is not None]
    blocks += [_throughput(runs, records), _step(runs), _communication(runs), _setup(runs)]
    return Section("training", "Training", blocks)


def interval(record: Record, figure: str) -> tuple[float, float, int] | None:
    """(low, high, number of trials) of the 95% confidence interval of the mean; None without one."""
    spread = record.summary.get(figure) or summarize([row.get(figure) for row in record.trials]) or {}
    return (*spread["ci95"], spread["n"]) if spread.get("ci95") else None


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
    return Table(
        "Throughput and scaling",
        columns,
        [_throughput_row(row, records) for row in runs],
        notes=(EFFICIENCY, _RATE, _TIMES, *([INVALID] if any(r.performance_valid is False for r in records) else [])),
    )


def _throughput_row(row: Named, records: Sequence[Record]) -> list[Cell]:
    record = row.record
    ranks = record.get("world_size")
    return [
        cells.text(row.name),
        cells.number(ranks, "d"),
        cells.measured(record, lambda: with_interval(record, "tokens_per_sec", ",.0f")),
        cells.measured(record, lambda: cells.of(record.values, "tokens_per_sec", ",.0f", 1 / ranks if ranks else 1)),
        cells.measured(record, lambda: with_interval(record, "step_time_ms", ",.2f")),
        cells.measured(record, lambda: efficiency_cell(record, records)),
        cells.measured(record, lambda: cells.of(record.values, "max_memory_mib", ",.0f")),
        cells.of(record.values, "loss", ".4f"),
        cells.status(record.get("exit_reason") or record.status),
        cells.yes_no(record.performance_valid, good=True),
    ]


def _step(runs: Sequence[Named]) -> Table:
    names = [*(name.capitalize() for name, _ in _PARTS), "Whole step", "Checkpoint pause"]
    keys = [*(key for _, key in _PARTS), "step_time_ms", "checkpoint_time_ms"]
    table_rows = [
        [
            cells.text(row.name),
            *(cells.measured(row.record, lambda k=key, r=row.record: cells.of(r.values, k, ",.3f")) for key in keys),  # type: ignore[misc]
        ]
        for row in runs
    ]
    note = "Milliseconds; forward and backward includes the synchronisation of gradients. A checkpoint's pause is not in the step."
    return Table("Where a step's time goes", [Column("Run"), *(Column(n, numeric=True) for n in names)], table_rows, notes=[note])  # fmt: skip


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
    columns = [Column("Run"), Column("Collectives a step"), Column("Bytes a step"), Column("MFU", numeric=True), Column("FLOPs convention"), Column("FLOPs a token", numeric=True)]  # fmt: skip
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
    return Table("What was trained", columns, rows, notes=["Batches are in samples. Warm-up steps train, but are not in the averages."])  # fmt: skip


def _curves(runs: Sequence[Named]) -> dict[Any, list[Named]]:
    """Valid runs by what one line in a plot over ranks stands for, in order."""
    out: dict[Any, list[Named]] = {}
    for row in runs:
        r = row.record
        if r.performance_valid is False or not r.get("world_size") or not r.get("tokens_per_sec"):
            continue
        out.setdefault((scaling.batch_folder(r), scaling.work_of(r), scaling.scheme_of(r)), []).append(row)
    return {key: group for key, group in out.items() if len({row.record.get("world_size") for row in group}) > 1}


def _curve_names(groups: dict[Any, list[Named]]) -> list[str]:
    plain = [_scheme(group[0].record) for group in groups.values()]
    return [
        name if plain.count(name) == 1 else f"{name} · {scaling.batch_folder(group[0].record).name}"
        for name, group in zip(plain, groups.values(), strict=True)
    ]


def _scheme(record: Record) -> str:
    return record.label.partition(" ×")[0]


def _rate_plot(runs: Sequence[Named]) -> Plot | None:
    groups = dict(list(_curves(runs).items())[:_MOST_CURVES])
    if not groups:
        return None
    series = []
    for name, group in zip(_curve_names(groups), groups.values(), strict=True):
        x = [row.record.get("world_size") for row in group]
        y = [row.record.get("tokens_per_sec") for row in group]
        bounds = [interval(row.record, "tokens_per_sec") or (rate, rate, 1) for row, rate in zip(group, y, strict=True)]
        series.append(Series(name, x, y, [b[0] for b in bounds], [b[1] for b in bounds]))
    return Plot(
        "Throughput over ranks",
        "Tokens per second of the whole job against the number of ranks; higher is better. Bars are 95% confidence intervals.",
        "lines",
        "ranks",
        "tokens/s",
        series,
        x_scale="ranks",
        y_from_zero=True,
    )


def _efficiency_plot(runs: Sequence[Named], records: Sequence[Record]) -> Plot | None:
    groups = dict(list(_curves(runs).items())[:_MOST_CURVES])
    series = []
    for name, group in zip(_curve_names(groups), groups.values(), strict=True):
        found = [(row.record.get("world_size"), scaling.efficiency(row.record, records).value) for row in group]
        known = [(ranks, value * 100) for ranks, value in found if value is not None]
        if len(known) > 1:
            series.append(Series(name, [x for x, _ in known], [y for _, y in known]))
    if not series:
        return None
    return Plot(
        "Scaling efficiency",
        "Share of ideal scaling against the number of ranks, by the definition below the first table; 100% is ideal.",
        "lines",
        "ranks",
        "efficiency %",
        series,
        x_scale="ranks",
        y_from_zero=True,
        reference=(100.0, "ideal"),
    )


def _breakdown_plot(runs: Sequence[Named]) -> Plot | None:
    known = [
        row
        for row in runs
        if row.record.performance_valid is not False
        and row.record.get("step_time_ms")
        and all(row.record.get(key) is not None for _, key in _PARTS)
    ][:24]
    if not known:
        return None
    parts = [[row.record.get(key) for row in known] for _, key in _PARTS]
    rest = [max(row.record.get("step_time_ms") - sum(p[i] for p in parts), 0.0) for i, row in enumerate(known)]
    series = [Series(name, (), values) for (name, _), values in zip(_PARTS, parts, strict=True)]
    return Plot(
        "Step breakdown",
        "Milliseconds of a step by part, each the slowest rank's mean; other is what the parts leave of the whole step.",
        "bars",
        "ms",
        "",
        [*series, Series("other", (), rest)],
        labels=[row.name for row in known],
    )


def _frontier_plot(runs: Sequence[Named]) -> Plot | None:
    groups: dict[str, list[Named]] = {}
    for row in runs:
        r = row.record
        if r.performance_valid is not False and r.get("max_memory_mib") and r.get("tokens_per_sec"):
            groups.setdefault(_scheme(r), []).append(row)
    if sum(map(len, groups.values())) < 2:
        return None
    series = [
        Series(
            name,
            [row.record.get("max_memory_mib") for row in group],
            [row.record.get("tokens_per_sec") for row in group],
            labels=[f"×{row.record.get('world_size') or '?'}" for row in group],
        )
        for name, group in groups.items()
    ]
    return Plot(
        "Memory against throughput",
        "Each point is a run, with its number of ranks: to the left is less memory on the fullest rank, above is faster.",
        "points",
        "MiB on the fullest rank",
        "tokens/s",
        series,
    )


def _loss_plot(runs: Sequence[Named]) -> Plot | None:
    series = []
    for row in runs:
        lines = next(iter(metrics_of(row.record).values()), [])
        known = [line for line in lines if line.get("global_step") is not None]
        # A loss that was not finite is null in the file, and breaks the line.
        losses = [math.nan if line.get("loss") is None else line["loss"] for line in known]
        if sum(map(math.isfinite, losses)) > 1:
            series.append(Series(row.name, [line["global_step"] for line in known], losses))
    if not series:
        return None
    left = len(series) - _MOST_CURVES
    return Plot(
        "Loss",
        "Mean loss over the valid tokens of the global batch, by optimizer step; where it was not finite the line is broken."
        + (f" {left} further runs are not drawn." if left > 0 else ""),
        "lines",
        "optimizer step",
        "loss",
        series[:_MOST_CURVES],
    )
