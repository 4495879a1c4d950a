"""A sweep for people: its cells before, its figures after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mtb_report.wording import by_kind, console

from .plan import SweepPlan

#: Shown where the result says that its times are not valid.
_NOT_VALID = "-"
#: Columns that mean nothing where the measurement is not valid, in their order, and their formats.
_PERFORMANCE = {"tokens_per_sec": ",.0f", "step_time_ms": ".2f", "max_memory_mib": ",.0f"}


def show_plan(plan: SweepPlan) -> None:
    """The cells in the order in which they would be run."""
    out = console()
    order = plan.in_order()
    common = {k: v for k, v in order[0].settings.items() if all(c.settings.get(k) == v for c in order)}
    out.print(f"{plan.name}{f' ({plan.size})' if plan.size else ''}: {len(order)} cells. {plan.about}", markup=False)
    out.print(f"All: {_settings(common)}", markup=False)
    table = Table("#", *_axes([cell.labels for cell in order]), "settings")
    for number, cell in enumerate(order, 1):
        rest = {k: v for k, v in cell.settings.items() if k not in common and k not in cell.labels}
        labels = (str(cell.labels[name]) for name in _axes([c.labels for c in order]))
        table.add_row(str(number), *labels, _settings(rest))
    out.print(table)


def show(document: Mapping[str, Any], folder: Path) -> None:
    """Status and figures of each cell, and where they are."""
    out = console()
    rows = document["cells"]
    axes = _axes([row["labels"] for row in rows])
    extra = [name for name in ("efficiency", "loss_error", "grad_norm_error") if any(name in row for row in rows)]
    table = Table(*axes, "status", "tokens/s", "step ms", "MiB", "trials", *(n.replace("_", " ") for n in extra))
    for row in rows:
        table.add_row(*(str(row["labels"][name]) for name in axes), row["status"] or "not run", *_figures(row, extra))
    out.print(table)
    for reason in dict.fromkeys(row.get("efficiency_reason") for row in rows):
        if reason is not None:
            out.print(f"No efficiency: {reason}", markup=False)
    for found in document.get("largest_that_fits", ()):
        out.print(_largest(found), markup=False)
    reasons = by_kind([reason for row in rows for reason in row["performance_invalid_reasons"]])
    if reasons:
        out.print(f"{_NOT_VALID}: not valid; the raw values are in the JSON. Reasons seen, an example of each:")
        for reason, count in reasons.items():
            out.print(f"  {reason} ({count} of {len(rows)} cells)", markup=False)
    out.print(f"Results: {folder}", soft_wrap=True, markup=False)


def _axes(labels: Sequence[Mapping[str, Any]]) -> list[str]:
    """The axes in which cells differ; all, where there is one cell."""
    several = [name for name in labels[0] if len({str(row[name]) for row in labels}) > 1]
    return several or list(labels[0])


def _settings(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _figures(row: Mapping[str, Any], extra: Sequence[str]) -> list[str]:
    figures, valid = row["figures"], row["performance_valid"] is not False
    shown = [_number(figures.get(name), form) for name, form in _PERFORMANCE.items()]
    cells = [*(text if valid or not text else _NOT_VALID for text in shown), str(row["trials"])]
    for name in extra:
        text = _number(row.get(name), ".1%" if name == "efficiency" else ".2e")
        if row.get(f"{name.removesuffix('_error')}_nonfinite_steps"):
            text = "not finite"
        cells.append(_NOT_VALID if name == "efficiency" and not valid else text)
    return cells


def _largest(found: Mapping[str, Any]) -> str:
    limit = found["first_that_does_not"]
    where = "".join(f" {name}={value}" for name, value in found["labels"].items())
    largest = "none" if found["largest"] is None else found["largest"]
    end = "none that was tried is too large" if limit is None else f"{limit} is too large"
    others = "".join(f"; {value}: {status}, not known whether it fits" for value, status in found["failed"].items())
    return f"Largest {found['axis']} that fits{where}: {largest} ({end}{others})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
