"""A sweep for people: its cells before, its figures after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .plan import SweepPlan

#: Shown where the result says that its times are not valid.
_NOT_VALID = "-"


def show_plan(plan: SweepPlan) -> None:
    """The cells in the order in which they would be run."""
    console = Console(highlight=False)
    table = Table("#", *plan.cells[0].labels, "settings", title_justify="left")
    table.title = f"{plan.name}{f' ({plan.size})' if plan.size else ''}: {len(plan.cells)} cells"
    for number, cell in enumerate(plan.in_order(), 1):
        rest = {k: v for k, v in cell.settings.items() if k not in cell.labels}
        settings = " ".join(f"{name}={value}" for name, value in rest.items())
        table.add_row(str(number), *(str(v) for v in cell.labels.values()), settings)
    console.print(table)


def show(document: Mapping[str, Any], folder: Path) -> None:
    """Status and figures of each cell, and where they are."""
    console = Console(highlight=False)
    rows = document["cells"]
    extra = [name for name in ("efficiency", "loss_error", "grad_norm_error") if any(name in row for row in rows)]
    table = Table(*rows[0]["labels"], "status", "tokens/s", "step ms", "memory MiB", "trials", *extra)
    for row in rows:
        valid = row["performance_valid"] is not False
        figures = row["figures"]
        cells = [str(value) for value in row["labels"].values()]
        cells.append(row["status"] or "not run")
        for name, form in (("tokens_per_sec", ",.0f"), ("step_time_ms", ".2f")):
            cells.append(_number(figures.get(name), form) if valid or figures.get(name) is None else _NOT_VALID)
        cells += [_number(figures.get("max_memory_mib"), ",.0f"), str(row["trials"])]
        for name in extra:
            shown = _number(row.get(name), ".1%" if name == "efficiency" else ".2e")
            cells.append(_NOT_VALID if name == "efficiency" and not valid and shown else shown)
        table.add_row(*cells)
    console.print(table)
    for found in document.get("largest_that_fits", ()):
        limit = found["first_that_does_not"]
        labels = " ".join(f"{k}={v}" for k, v in found["labels"].items())
        end = "none was too large" if limit is None else f"{limit} is too large"
        console.print(f"largest {found['axis']} that fits, {labels}: {found['largest']} ({end})".replace(", :", ":"))
    reasons = dict.fromkeys(reason for row in rows for reason in row["performance_invalid_reasons"])
    if reasons:
        console.print(f"{_NOT_VALID}: not valid, the raw values are in the JSON. Reasons seen:")
        for reason in reasons:
            console.print(f"  {reason}", markup=False)
    console.print(f"Results: {folder}", soft_wrap=True)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
