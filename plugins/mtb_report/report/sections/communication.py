"""Collectives: bandwidth over size, as nccl-tests defines it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtb_report.report import cells
from mtb_report.report.blocks import Block, Cell, Column, Plot, Section, Series, Table
from mtb_report.report.naming import Named
from mtb_report.report.plots import size_text
from mtb_report.results import Record

_DEFINITION = (
    "S, algbw = S / t and busbw = algbw × factor as nccl-tests defines them (all-reduce 2(n-1)/n; all-gather, "
    "reduce-scatter, all-to-all, gather, scatter (n-1)/n; others 1); GB = 10^9 bytes. t is the mean over calls "
    "of the maximum over ranks, n the number of ranks. Bandwidth of one operation says nothing about another's."
)
_TIMES = ("mean", "min", "p50", "p95", "max")


def section(rows: Sequence[Named]) -> Section | None:
    """A plot and a table of each document, and fitted latency and bandwidth."""
    documents = [row for row in rows if row.record.kind == "communication"]
    if not documents:
        return None
    plots = [plot for plot in map(_plot, documents) if plot is not None]
    blocks: list[Block] = [*plots, *map(_table, documents)]
    fits = _fits(documents)
    return Section("communication", "Communication", [*blocks, *([fits] if fits else [])])


def _table(row: Named) -> Table:
    record = row.record
    titles = [
        "Operation",
        "S",
        "Ranks",
        *(f"{name} ms" for name in _TIMES),
        "Calls",
        "algbw GB/s",
        "busbw GB/s",
        "Wrong",
        "Status",
        "Reason",
    ]
    out = [_row(record, point) for point in record.rows]
    text = {"Operation", "Status", "Reason"}
    where = ", ".join(
        str(part) for part in (record.get("backend"), record.get("device_name") or record.get("device")) if part
    )
    return Table(
        f"{row.name}{f', {where}' if where else ''}",
        [Column(t, numeric=t not in text) for t in titles],
        out,
        notes=[_DEFINITION],
    )


def _row(record: Record, point: Mapping[str, Any]) -> list[Cell]:
    size, times = point.get("size_bytes"), point.get("time_ms")
    figures = [cells.of(times if isinstance(times, Mapping) else {}, name, "sig") for name in _TIMES]
    rates = [cells.of(point, name, "sig") for name in ("algbw_gb_per_sec", "busbw_gb_per_sec")]
    return [
        Cell(_operation(point), _operation(point)),
        cells.UNKNOWN if size is None else Cell(size_text(size), size),
        cells.text(point.get("world_size")),
        *(cells.measured(record, lambda cell=cell: cell) for cell in figures),  # type: ignore[misc]
        cells.text(point.get("iterations")),
        *(cells.measured(record, lambda cell=cell: cell) for cell in rates),  # type: ignore[misc]
        _wrong(point),
        cells.status(point.get("status")),
        Cell("none", "", "muted") if not point.get("reason") else cells.text(point["reason"]),
    ]


def _operation(point: Mapping[str, Any]) -> str:
    parts = [point.get("reduction"), point.get("split"), point.get("dtype")]
    how = ", ".join(str(part) for part in parts if part)
    return f"{point.get('operation') or 'unknown'}{f' ({how})' if how else ''}"


def _wrong(point: Mapping[str, Any]) -> Cell:
    found = cells.of(point, "wrong", ",d")
    return Cell(found.text, found.sort, "bad") if point.get("wrong") else found


def _plot(row: Named) -> Plot | None:
    """The plot of busbw over size, one line for what differs in anything but the size."""
    lines: dict[str, list[tuple[float, float]]] = {}
    dtypes = {point.get("dtype") for point in row.record.rows}
    for point in row.record.rows:
        size, rate = point.get("size_bytes"), point.get("busbw_gb_per_sec")
        if size and rate:
            name = _operation(point if len(dtypes) > 1 else {**point, "dtype": None})
            lines.setdefault(name, []).append((size, rate))
    if not lines or row.record.performance_valid is False:
        return None
    return Plot(
        f"busbw over size: {row.name}",
        "Bus bandwidth against message size S, both on logarithmic scales; higher is better.",
        "lines",
        "S (bytes)",
        "busbw GB/s",
        [Series(name, *zip(*sorted(points), strict=True)) for name, points in lines.items()],
        x_scale="log",
        y_scale="log",
    )


def _fits(documents: Sequence[Named]) -> Table | None:
    out = []
    for row in documents:
        for fit in row.record.get("fits") or ():
            alpha = fit.get("alpha_s")
            error = fit.get("alpha_error_s")
            made = [
                cells.number(None if alpha is None else alpha * 1e6, "sig"),
                cells.number(None if error is None else error * 1e6, "sig"),
                cells.of(fit, "beta_gb_per_sec", "sig"),
                cells.of(fit, "beta_error_gb_per_sec", "sig"),
            ]
            shown = [cells.measured(row.record, lambda cell=cell: cell) for cell in made]  # type: ignore[misc]
            out.append([cells.text(row.name), cells.text(_operation(fit)), *shown, cells.text(fit.get("points"))])
    if not out:
        return None
    titles = ["Document", "Operation", "Latency µs", "±", "Bandwidth GB/s", "± ", "Points"]
    return Table(
        "Fitted latency and bandwidth",
        [Column(t, numeric=t not in ("Document", "Operation")) for t in titles],
        out,
        notes=["t(S) = latency + S / bandwidth, in algbw; ± is the standard error, unknown with two points."],
    )
