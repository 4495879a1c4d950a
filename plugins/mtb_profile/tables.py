"""The analysis for people: tables on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .analysis import Analysis
from .losses import Losses
from .verdict import Verdict

#: Width where stdout is no terminal and ``COLUMNS`` does not say.
_PIPE_WIDTH = 110


def show(parts: Sequence[RenderableType]) -> None:
    """Print `parts` on stdout, one below the other."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(captured.get().encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def analysis_tables(analysis: Analysis, verdict: Verdict, losses: Losses | None) -> list[RenderableType]:
    """Everything that was found, the verdict last."""
    parts: list[RenderableType] = [_breakdown(analysis)]
    if any(r.collectives for r in analysis.ranks):
        parts.append(_collectives(analysis))
    if any(a.collectives for a in analysis.arrivals):
        parts.append(_arrivals(analysis))
    if analysis.stragglers:
        parts.append(_stragglers(analysis))
    if losses is not None:
        parts += _losses(losses)
    parts += [Text(f"note: {note}") for note in analysis.notes]
    parts.append(Text(f"\nVerdict: {verdict.bound}. {verdict.text}", style="bold"))
    parts += [Text(f"- {line}") for line in verdict.evidence]
    if verdict.uncertain_because:
        parts.append(Text("What makes this uncertain:"))
        parts += [Text(f"- {line}") for line in verdict.uncertain_because]
    parts.append(Text("What to try:"))
    parts += [Text(f"- {line}") for line in verdict.advice]
    return parts


def _table(title: str, columns: Sequence[str], left: int = 1) -> Table:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    return table


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f}"


def _breakdown(analysis: Analysis) -> Table:
    windows = sorted({r.view.window for r in analysis.ranks})
    table = _table(
        f"Where the time goes, ms (window: {', '.join(windows)}); compute + exposed + memory + idle = span",
        [
            "rank",
            "steps",
            "span",
            "compute",
            "communication",
            "overlapped",
            "exposed",
            "of it waiting",
            "memory",
            "idle",
        ],
    )
    for r in analysis.ranks:
        t = r.times
        waiting = _ms(r.waiting) if analysis.waiting_is_known else "-"
        before, after = (t.span, t.compute, t.communication, t.overlapped, t.exposed), (t.memory, t.idle)
        table.add_row(str(r.rank), str(len(r.view.steps.steps) or "-"), *map(_ms, before), waiting, *map(_ms, after))
    return table


def _collectives(analysis: Analysis) -> Table:
    columns = [
        "rank",
        "operation",
        "group",
        "dtype",
        "count",
        "MiB",
        "time ms",
        "transfer ms",
        "algbw GB/s",
        "busbw GB/s",
    ]
    table = _table(
        "Collectives (bandwidth as nccl-tests defines it, over the transfer where it is known)", columns, left=4
    )
    for r in analysis.ranks:
        for c in r.collectives:
            table.add_row(
                str(r.rank),
                c.operation,
                c.group or "-",
                c.dtype or "-",
                str(c.count),
                "-" if c.message_bytes is None else f"{c.message_bytes / 2**20:.3f}",
                _ms(c.time),
                "-" if c.transfer is None else _ms(c.transfer),
                "-" if c.algbw is None else f"{c.algbw:.3f}",
                "-" if c.busbw is None else f"{c.busbw:.3f}",
            )
    return table


def _arrivals(analysis: Analysis) -> Table:
    table = _table(
        "Who comes last to the collectives that ranks share",
        ["rank", "collectives", "last", "mean lateness ms", "waiting ms", "transfer ms", "when last, in"],
    )
    for a in analysis.arrivals:
        where = ", ".join(f"{name} {count}" for name, count in sorted(a.phases.items(), key=lambda item: -item[1]))
        share = f"{a.last} ({a.last / a.collectives:.0%})" if a.collectives else "-"
        table.add_row(
            str(a.rank), str(a.collectives), share, _ms(a.lateness), _ms(a.waiting), _ms(a.transfer), where or "-"
        )
    return table


def _stragglers(analysis: Analysis) -> Table:
    table = _table(
        "Stragglers: own time (without communication) beyond the median of the other ranks, median over steps",
        [
            "rank",
            "phase",
            "excess there ms",
            "in the whole step ms",
            "of it computing ms",
            "share of step",
            "slower in",
        ],
        left=2,
    )
    for s in analysis.stragglers:
        table.add_row(
            str(s.rank), s.phase, _ms(s.phase_excess), _ms(s.excess), _ms(max(s.compute_excess, 0.0)), f"{s.share:.0%}",
            f"{s.slower} of {s.steps} steps",
        )  # fmt: skip
    return table


def _losses(losses: Losses) -> list[RenderableType]:
    table = _table(
        f"From the ideal step to the measured one, {losses.measured_ms:.3f} ms",
        ["", "ms", "points", "normal", "", "repair"],
    )
    table.columns[3].justify = table.columns[4].justify = table.columns[5].justify = "left"
    if losses.ideal_ms is not None and losses.mfu is not None:
        table.add_row("ideal step", f"{losses.ideal_ms:.3f}", f"{losses.mfu * 100:.1f}", "", "", "")
    for loss in losses.losses:
        ms = "unknown" if loss.ms is None else f"{loss.ms:.3f}"
        points = "-" if loss.points is None else f"{loss.points:.1f}"
        table.add_row(
            loss.name.replace("_", " "), ms, points, loss.normal, "unusual" if loss.unusual else "", loss.repair
        )
    parts: list[RenderableType] = [table, *(Text(f"note: {note}") for note in losses.notes)]
    order = losses.in_order_of_repair()
    if order:
        parts.append(Text(f"Order of repair: {', '.join(loss.name.replace('_', ' ') for loss in order)}."))
    return parts


def operator_table(rows: Sequence[Mapping[str, Any]], rank: int) -> Table:
    """The operators with the most time of their own."""
    timed = "self_device_time_us" if any(r["self_device_time_us"] for r in rows) else "self_cpu_time_us"
    table = _table(f"Top operators of rank {rank}", ["operator", "calls", f"own time ms ({timed[5:-8]})"])
    for row in rows:
        table.add_row(row["name"], str(row["calls"]), f"{row[timed] / 1e3:.3f}")
    return table
