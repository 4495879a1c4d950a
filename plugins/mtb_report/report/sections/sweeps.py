"""Sweeps: every cell with its outcome, also those that have no result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtb_report.report import cells
from mtb_report.report.blocks import Block, Cell, Column, Listing, Section, Table, Text
from mtb_report.report.naming import Named

_FIGURES = (
    ("Tokens/s", "tokens_per_sec", ",.0f"),
    ("Step ms", "step_time_ms", ",.2f"),
    ("Memory MiB", "max_memory_mib", ",.0f"),
)


def section(rows: Sequence[Named]) -> Section | None:
    """For each sweep its cells, their figures, and what follows from them together."""
    found = [row for row in rows if row.record.kind == "sweep"]
    if not found:
        return None
    blocks: list[Block] = []
    for row in found:
        name = str(row.record.get("name") or row.name)
        if row.record.get("about"):
            blocks.append(Text(f"{name}: {row.record.get('about')}"))
        blocks += [_figures(name, row), *_largest(name, row), _outcomes(name, row)]
    return Section("sweeps", "Sweeps", blocks)


def _label(cell: Mapping[str, Any], number: int) -> str:
    labels = cell.get("labels") or {}
    return " ".join(f"{key}={value}" for key, value in labels.items()) or str(cell.get("id") or f"cell {number}")


def _figures(name: str, row: Named) -> Table:
    scaling = row.record.get("scaling")
    errors = [
        key for key in ("loss_error", "grad_norm_error") if any(cell.get(key) is not None for cell in row.record.rows)
    ]
    titles = ["Cell", "Status", *(title for title, _, _ in _FIGURES), "Trials", "Valid"]
    titles += ["Efficiency"] if scaling else []
    titles += [{"loss_error": "Loss error", "grad_norm_error": "Gradient error"}[key] for key in errors]
    out = []
    for number, cell in enumerate(row.record.rows):
        figures = cell.get("figures") or {}
        valid = cell.get("performance_valid")
        shown = [cells.of(figures, key, form) for _, key, form in _FIGURES]
        line = [
            cells.text(_label(cell, number)),
            cells.status(cell.get("status") or "not run"),
            *(cells.NOT_VALID if valid is False else value for value in shown),
            cells.of(cell, "trials", "d"),
            cells.yes_no(valid, good=True),
        ]
        if scaling:
            line.append(cells.NOT_VALID if valid is False else cells.percent(cell.get("efficiency")))
        line += [cells.of(cell, key, ".2e") for key in errors]
        out.append(line)
    notes = []
    if scaling:
        notes.append(
            f"Efficiency, {scaling} scaling, {row.record.get('efficiency_definition') or 'by an unknown definition'}; relative to the fewest ranks."
        )
    if errors:
        against = " ".join(f"{key}={value}" for key, value in (row.record.get("error_against") or {}).items())
        notes.append(
            f"Error: largest relative deviation of a step from the cell with {against or 'an unknown setting'}."
        )
    text = {"Cell", "Status", "Valid"}
    return Table(f"Cells of {name}", [Column(t, numeric=t not in text) for t in titles], out, notes=notes)


def _largest(name: str, row: Named) -> list[Block]:
    out = []
    for found in row.record.get("largest_that_fits") or ():
        labels = " ".join(f"{key}={value}" for key, value in (found.get("labels") or {}).items())
        axis, largest, beyond = found.get("axis"), found.get("largest"), found.get("first_that_does_not")
        fits = "none fits" if largest is None else f"the largest that fits is {largest}"
        limit = "no larger one was tried" if beyond is None else f"{beyond} does not"
        out.append(f"{name}{f', {labels}' if labels else ''}: of {axis} {fits}; {limit}.")
    return [Listing(out)] if out else []


def _outcomes(name: str, row: Named) -> Table:
    out = []
    for number, cell in enumerate(row.record.rows):
        fine = cell.get("status") == "success"
        why = [str(part) for part in (cell.get("failure_type"), cell.get("reason")) if part]
        out.append(
            [
                cells.text(_label(cell, number)),
                cells.status(cell.get("status") or "not run"),
                Cell("none", "", "muted") if fine else cells.text(": ".join(why)),
                cells.text(cell.get("exit_code")),
                cells.of(cell, "seconds", ",.1f"),
                cells.code(cell.get("log_digest"), 12),
                cells.code(cell.get("command")),
            ]
        )
    titles = ["Cell", "Status", "Failure", "Exit code", "Seconds", "Log digest", "Command"]
    columns = [Column(t, numeric=t in ("Exit code", "Seconds")) for t in titles]
    return Table(f"Outcomes of {name}", columns, out, notes=["A cell that failed is recorded, and the others go on."])
