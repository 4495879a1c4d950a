"""Plots of training runs. Runs share a plot only if they did the same work; see `scaling.work_of`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mtb_report.report import scaling
from mtb_report.report.blocks import Plot, Series
from mtb_report.report.naming import Named
from mtb_report.report.trainings import PARTS, interval
from mtb_report.results import Record, metrics_of

#: More curves than this in one plot cannot be told apart.
_MOST_CURVES = 12
_MOST_BARS = 40


def plots_of(runs: Sequence[Named]) -> list[Plot]:
    """All plots that the runs allow; those that are not valid measurements are in none but that of the loss."""
    works: dict[Any, list[Named]] = {}
    for row in runs:
        if row.record.performance_valid is not False:
            works.setdefault(scaling.work_of(row.record), []).append(row)
    out: list[Plot | None] = []
    drawn = [group for group in works.values() if len(group) > 1]
    for group in drawn:
        title = f": {_work(group[0].record)}" if len(drawn) > 1 else ""
        out += [_rate(group, title), _efficiency(group, title), _frontier(group, title)]
    out += [_loss(runs), _breakdown([row for group in works.values() for row in group])]
    return [plot for plot in out if plot is not None]


def _work(record: Record) -> str:
    parameters = record.get("parameters")
    size = "unknown size" if not parameters else f"{parameters / 1e6:,.3g}M parameters"
    where = record.get("device_name") or record.get("device")
    return ", ".join(str(part) for part in (size, record.get("precision"), where) if part)


def _curves(runs: Sequence[Named]) -> dict[str, list[Named]]:
    """Runs by the name of the line that they make in a plot over ranks: one folder, one strategy, several ranks."""
    groups: dict[Any, list[Named]] = {}
    for row in runs:
        if row.record.get("world_size") and row.record.get("tokens_per_sec"):
            key = (scaling.batch_folder(row.record), scaling.scheme_of(row.record))
            groups.setdefault(key, []).append(row)
    lines = [group for group in groups.values() if len({row.record.get("world_size") for row in group}) > 1]
    plain = [_scheme(group[0].record) for group in lines]
    out: dict[str, list[Named]] = {}
    for name, group in zip(plain, lines, strict=True):
        unique = name if plain.count(name) == 1 else f"{name} · {scaling.batch_folder(group[0].record).name}"
        out[unique if unique not in out else f"{unique} ({len(out)})"] = group
    return dict(list(out.items())[:_MOST_CURVES])


def _scheme(record: Record) -> str:
    return record.label.partition(" ×")[0]


def _rate(runs: Sequence[Named], title: str) -> Plot | None:
    series = []
    for name, group in _curves(runs).items():
        x = [row.record.get("world_size") for row in group]
        y = [row.record.get("tokens_per_sec") for row in group]
        bounds = [interval(row.record, "tokens_per_sec") or (rate, rate, 1) for row, rate in zip(group, y, strict=True)]
        series.append(Series(name, x, y, [b[0] for b in bounds], [b[1] for b in bounds]))
    if not series:
        return None
    return Plot(
        f"Throughput over ranks{title}",
        "Tokens per second of the whole job against the number of ranks; higher is better. Bars are 95% confidence intervals.",
        "lines",
        "ranks",
        "tokens/s",
        series,
        x_scale="ranks",
        y_from_zero=True,
    )


def _efficiency(runs: Sequence[Named], title: str) -> Plot | None:
    records = [row.record for row in runs]
    series = []
    for name, group in _curves(runs).items():
        found = [(row.record.get("world_size"), scaling.efficiency(row.record, records).value) for row in group]
        known = [(ranks, value * 100) for ranks, value in found if value is not None]
        if len(known) > 1:
            series.append(Series(name, [x for x, _ in known], [y for _, y in known]))
    if not series:
        return None
    return Plot(
        f"Scaling efficiency{title}",
        "Share of ideal scaling against the number of ranks, by the definition below the first table; 100% is ideal.",
        "lines",
        "ranks",
        "efficiency %",
        series,
        x_scale="ranks",
        y_from_zero=True,
        reference=(100.0, "ideal"),
    )


def _frontier(runs: Sequence[Named], title: str) -> Plot | None:
    groups: dict[str, list[Named]] = {}
    for row in runs:
        if row.record.get("max_memory_mib") and row.record.get("tokens_per_sec"):
            groups.setdefault(_scheme(row.record), []).append(row)
    if len(groups) < 2 and len({row.record.get("world_size") for row in runs}) < 2:
        return None  # nothing to choose between
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
        f"Memory against throughput{title}",
        "Each point is a run, with its number of ranks: to the left is less memory on the fullest rank, above is faster.",
        "points",
        "MiB on the fullest rank",
        "tokens/s",
        series,
    )


def _breakdown(runs: Sequence[Named]) -> Plot | None:
    known = [
        row
        for row in runs
        if row.record.get("step_time_ms") and all(row.record.get(key) is not None for _, key in PARTS)
    ]
    if not known:
        return None
    shown = known[:_MOST_BARS]
    parts = [[row.record.get(key) for row in shown] for _, key in PARTS]
    rest = [max(row.record.get("step_time_ms") - sum(p[i] for p in parts), 0.0) for i, row in enumerate(shown)]
    series = [Series(name, (), values) for (name, _), values in zip(PARTS, parts, strict=True)]
    return Plot(
        "Step breakdown",
        "Milliseconds of a step by part, each the slowest rank's mean; other is what the parts leave of the whole step."
        + (f" The first {_MOST_BARS} of {len(known)} runs." if len(known) > _MOST_BARS else ""),
        "bars",
        "ms",
        "",
        [*series, Series("other", (), rest)],
        labels=[row.name for row in shown],
    )


def _loss(runs: Sequence[Named]) -> Plot | None:
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
