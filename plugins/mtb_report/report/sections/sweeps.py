"""Sweeps: every cell with its outcome, also those that have no result."""

from __future__ import annotations

from collections import Counter
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

_ERRORS = {"loss_error": "Loss error", "grad_norm_error": "Gradient error"}


def section(rows: Sequence[Named]) -> Section | None:
    """For each sweep its cells, their figures, and what follows from them together."""
    found = [row for row in rows if row.record.kind == "sweep"]
    if not found:
        return None
    blocks: list[Block] = []
    for row in found:
        name = str(row.record.get("name") or row.name)
        about = row.record.get("about")
        blocks.append(Text(f"{name}: {f'{about} ' if about else ''}{_counts(row)}"))
        blocks += [_figures(name, row), *_largest(name, row), _outcomes(name, row)]
    return Section("sweeps", "Sweeps", blocks)


def _counts(row: Named) -> str:
    """How many cells ended how, all outcomes counted."""
    counts = Counter(str(cell.get("status") or "not run") for cell in row.record.rows)
    listed = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{cells.plural(len(row.record.rows), 'cell')}{f': {listed}' if listed else ''}."


def _label(cell: Mapping[str, Any], number: int) -> str:
    labels = cell.get("labels") or {}
    return " ".join(f"{key}={value}" for key, value in labels.items()) or str(cell.get("id") or f"cell {number}")


def _figures(name: str, row: Named) -> Table:
    scaling = row.record.get("scaling")
    errors = [key for key in _ERRORS if any(key in cell for cell in row.record.rows)]
    titles = ["Cell", "Status", *(title for title, _, _ in _FIGURES), "Trials", "Valid"]
    titles += ["Efficiency"] if scaling else []
    titles += [*(_ERRORS[key] for key in errors), "Steps compared"] if errors else []
    out = []
    for number, cell in enumerate(row.record.rows):
        valid = cell.get("performance_valid")
        shown = [_with_interval(cell, key, form) for _, key, form in _FIGURES]
        line = [
            cells.text(_label(cell, number)),
            cells.status(cell.get("status") or "not run"),
            *(cells.NOT_VALID if valid is False else value for value in shown),
            cells.of(cell, "trials", "d"),
            cells.yes_no(valid, good=True),
        ]
        line += [_efficiency(cell)] if scaling else []
        line += [*(_error(cell, key) for key in errors), cells.of(cell, "error_steps", "d")] if errors else []
        out.append(line)
    notes = ["±: half the 95% interval of the mean over independent trials."]
    if scaling:
        notes.append(
            f"Efficiency, {scaling} scaling, {row.record.get('efficiency_definition') or 'by an unknown definition'}; relative to the fewest ranks."
        )
    if errors:
        against = " ".join(f"{key}={value}" for key, value in (row.record.get("error_against") or {}).items())
        notes.append(
            f"Error: largest relative deviation of a step from the cell with {against or 'an unknown setting'}, over the "
            "steps compared. Not finite: in so many steps the figure of the cell or of that one was not; no number tells "
            "how far such a training is off."
        )
    text = {"Cell", "Status", "Valid"}
    return Table(f"Cells of {name}", [Column(t, numeric=t not in text) for t in titles], out, notes=notes)


def _with_interval(cell: Mapping[str, Any], key: str, form: str) -> Cell:
    """The figure, with half the 95% interval of its mean where the cell has several trials."""
    shown = cells.of(cell.get("figures") or {}, key, form)
    low, high = ((cell.get("summary") or {}).get(key) or {}).get("ci95") or (None, None)
    if low is None or shown.sort is None:
        return shown
    return Cell(f"{shown.text} ± {format((high - low) / 2, form)}", shown.sort)


def _efficiency(cell: Mapping[str, Any]) -> Cell:
    """The share, or why there is none."""
    if cell.get("performance_valid") is False:
        return cells.NOT_VALID
    if cell.get("efficiency") is None and cell.get("efficiency_reason"):
        return Cell(str(cell["efficiency_reason"]), None, "muted")
    return cells.percent(cell.get("efficiency"))


def _error(cell: Mapping[str, Any], key: str) -> Cell:
    bad = cell.get(f"{key.removesuffix('_error')}_nonfinite_steps")
    return Cell(f"not finite: {cells.plural(bad, 'step')}", None, "bad") if bad else cells.of(cell, key, ".2e")


def _largest(name: str, row: Named) -> list[Block]:
    out = []
    for found in row.record.get("largest_that_fits") or ():
        labels = " ".join(f"{key}={value}" for key, value in (found.get("labels") or {}).items())
        axis, largest, beyond = found.get("axis"), found.get("largest"), found.get("first_that_does_not")
        fits = "none fits" if largest is None else f"the largest that fits is {largest}"
        limit = "none that was tried is too large" if beyond is None else f"{beyond} does not"
        others = "".join(
            f"; {v}: {status}, not known whether it fits" for v, status in (found.get("failed") or {}).items()
        )
        out.append(f"{name}{f', {labels}' if labels else ''}: of {axis} {fits}; {limit}{others}.")
    return [Listing(out)] if out else []


def _outcomes(name: str, row: Named) -> Table:
    out = []
    for number, cell in enumerate(row.record.rows):
        none = Cell("none", "", "muted")
        fine, run = cell.get("status") == "success", cell.get("status") is not None
        out.append(
            [
                cells.text(_label(cell, number)),
                cells.status(cell.get("status") or "not run"),
                none if fine or not run else cells.text(cell.get("failure_type")),
                none if fine or not (run or cell.get("reason")) else cells.text(cell.get("reason")),
                cells.text(cell.get("exit_code")) if run else none,
                cells.of(cell, "seconds", ",.1f") if run else none,
                cells.code(cell.get("log_digest"), 12) if run else none,
                cells.code(cell.get("command")) if run else none,
            ]
        )
    titles = ["Cell", "Status", "Failure", "Reason", "Exit code", "Seconds", "Log digest", "Command"]
    columns = [Column(t, numeric=t in ("Exit code", "Seconds")) for t in titles]
    return Table(f"Outcomes of {name}", columns, out, notes=["A cell that failed is recorded, and the others go on."])
