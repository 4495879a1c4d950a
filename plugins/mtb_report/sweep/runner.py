"""Running a sweep's cells, and ``sweep.json``, which is whole after every cell."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from mtb_core import ConfigError, redact, write_json
from mtb_evidence import provenance
from mtb_report.results import FIGURES, Record, metrics_of, read_record
from mtb_report.training import Attempt, train

from .analysis import EFFICIENCY, add_efficiency, add_errors, largest_that_fits
from .plan import Cell, SweepPlan, group_of, in_file_order

SCHEMA_VERSION = 1
FILE = "sweep.json"


@attrs.frozen
class Progress:
    """Said before and after each cell.

    Attributes:
        row: the cell's row; None before it was run.
        left_s: how long the rest will take, by the median of those that were run now; None before there is one.
    """

    number: int
    of: int
    cell: Cell
    row: dict[str, Any] | None
    left_s: float | None


def run_sweep(
    plan: SweepPlan,
    folder: Path,
    *,
    argv: Sequence[str],
    retry: bool = False,
    formal: bool = False,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
) -> dict[str, Any]:
    """Run the cells of `plan` that `folder` does not have yet, and return the document, which is in `folder` too.

    With `retry`, cells that did not succeed are run again; with `formal`, those too that were run on another revision.
    ``provenance`` of the document is that of the start, so that a change of the code meanwhile is seen.

    Raises:
        ConfigError: the folder holds another sweep.
        KeyboardInterrupt: Ctrl-C; what was run is recorded, and the same call goes on.
    """
    origin = provenance(argv)
    rows = _recorded(plan, folder, retry=retry)
    if formal:
        rows = {name: row for name, row in rows.items() if _is_of(row, origin)}
    write_json(folder / FILE, _document(plan, folder, rows, origin, formal=formal))  # the folder is this sweep's now
    seconds: list[float] = []
    order = plan.in_order()
    for number, cell in enumerate(order, 1):
        if cell.id in rows:
            continue
        left = sum(other.id not in rows for other in order)
        on_progress(Progress(number, len(order), cell, None, _left(seconds, left)))
        rows[cell.id] = _beyond(plan, cell, rows) or _run(plan, cell, folder, origin)
        if rows[cell.id]["seconds"] is not None:
            seconds.append(rows[cell.id]["seconds"])
        write_json(folder / FILE, _document(plan, folder, rows, origin, formal=formal))
        on_progress(Progress(number, len(order), cell, rows[cell.id], _left(seconds, left - 1)))
    document = _document(plan, folder, rows, origin, formal=formal)
    write_json(folder / FILE, document)
    return document


def _left(seconds: Sequence[float], cells: int) -> float | None:
    return statistics.median(seconds) * cells if seconds else None


def refuse_other(plan: SweepPlan, folder: Path) -> None:
    """Nothing where `folder` is not there, is empty, or holds a sweep of the same name and size.

    Raises:
        ConfigError: it holds anything else.
    """
    file = folder / FILE
    if not file.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is not empty and holds no sweep; name another folder.")
        return
    record = read_record(file)
    if record.kind != "sweep" or record.get("name") != plan.name or record.get("size") != plan.size:
        raise ConfigError(
            f"{folder} holds the sweep {record.get('name')!r} in size {record.get('size')!r}, not {plan.name!r} in size "
            f"{plan.size!r}; name another folder."
        )


def _recorded(plan: SweepPlan, folder: Path, *, retry: bool) -> dict[str, dict[str, Any]]:
    """Rows of earlier calls that still hold, by cell."""
    refuse_other(plan, folder)
    file = folder / FILE
    if not file.exists():
        return {}
    wanted = {cell.id for cell in plan.cells}
    kept = ("success",) if retry else ("success", "partial", "oom", "timeout", "failed", "failed_parse")
    rows = {row["id"]: dict(row) for row in read_record(file).rows if row["id"] in wanted and row["status"] in kept}
    return {name: row for name, row in rows.items() if _still_there(folder, row)}


def _is_of(row: Mapping[str, Any], origin: Mapping[str, Any]) -> bool:
    """Whether a cell was run on the revision of `origin`, no tracked file changed."""
    return (row.get("git_revision"), row.get("git_dirty")) == (origin["git_revision"], False)


def _still_there(folder: Path, row: dict[str, Any]) -> bool:
    """Whether the result that a row tells of is there and unchanged."""
    if row["result"] is None:
        return True
    try:
        digest: str = row["result_digest"]
        return read_record(folder / row["result"]).digest == digest
    except ConfigError:
        return False


def _beyond(plan: SweepPlan, cell: Cell, rows: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The row of a cell that is not tried, because a smaller one did not fit."""
    if plan.largest is None:
        return None
    group = group_of(cell.labels, plan.largest)
    order = in_file_order([other.labels for other in plan.cells], plan.largest)
    too_large = [
        order.index(row["labels"][plan.largest])
        for row in rows.values()
        if row["status"] == "oom" and group_of(row["labels"], plan.largest) == group
    ]
    if not too_large or order.index(cell.labels[plan.largest]) < min(too_large):
        return None
    row = _empty_row(cell)
    row["reason"] = f"not tried: {plan.largest} = {order[min(too_large)]} ran out of memory"
    return row


def _empty_row(cell: Cell) -> dict[str, Any]:
    return {
        "id": cell.id,
        "labels": dict(cell.labels),
        "settings": {name: redact(v) if isinstance(v, str) else v for name, v in cell.settings.items()},
        "status": None,
        "failure_type": None,
        "reason": None,
        "exit_code": None,
        "command": None,
        "log": None,
        "log_digest": None,
        "seconds": None,
        "result": None,
        "result_digest": None,
        "git_revision": None,
        "git_dirty": None,
        "performance_valid": None,
        "performance_invalid_reasons": [],
        "trials": 0,
        "figures": {},
        "summary": {},
    }


def _run(plan: SweepPlan, cell: Cell, folder: Path, origin: Mapping[str, Any]) -> dict[str, Any]:
    place = folder / "cells" / cell.id
    if place.exists():
        shutil.rmtree(place)  # of an attempt that was interrupted, or is to be made again
    return row_of(cell, train(place, cell.settings, timeout_s=plan.timeout_s), origin)


def row_of(cell: Cell, attempt: Attempt, origin: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a cell that was run; a cell without a result has no figures, not zeros.

    Its revision is that of the result; of a cell without one, that of `origin`, the sweep's start.
    """
    row = _empty_row(cell)
    row.update({k: v for k, v in attrs.asdict(attempt, recurse=False).items() if k in row and k != "result"})
    row["log"] = f"cells/{cell.id}/log.txt"
    record = attempt.result
    source = origin if record is None else record.provenance
    row.update({name: source.get(name) for name in ("git_revision", "git_dirty")})
    if record is not None:
        row["result"] = f"cells/{cell.id}/run/result.json"
        row["result_digest"] = record.digest
        row["performance_valid"] = record.performance_valid
        row["performance_invalid_reasons"] = list(record.performance_invalid_reasons)
        row["trials"] = len(record.trials)
        row["figures"] = _figures(record)
        row["summary"] = {name: dict(spread) for name, spread in record.summary.items()}
    return row


def _figures(record: Record) -> dict[str, Any]:
    names = (*FIGURES, "parameters", "world_size", "global_batch_size", "memory_kind", "device")
    return {**{name: record.get(name) for name in names}, "torch_threads": record.environment.get("torch_threads")}


def _document(
    plan: SweepPlan,
    folder: Path,
    rows: dict[str, dict[str, Any]],
    origin: Mapping[str, Any],
    *,
    formal: bool,
) -> dict[str, Any]:
    cells = [dict(rows.get(cell.id) or _empty_row(cell)) for cell in plan.cells]
    out: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "sweep",
        "name": plan.name,
        "about": plan.about,
        "size": plan.size,
        "formal": formal,
        "seed": plan.seed,
        "order": [cell.id for cell in plan.in_order()],
        "timeout_s": plan.timeout_s,
        "scaling": plan.scaling,
        "efficiency_definition": None if plan.scaling is None else EFFICIENCY[plan.scaling],
        "error_against": plan.error_against,
        "counts": {},
        "status": "success" if all(row["status"] == "success" for row in cells) else "partial",
        "execution_complete": all(cell.id in rows for cell in plan.cells),
        "provenance": dict(origin),
        "cells": cells,
    }
    for row in cells:
        out["counts"][row["status"] or "not_run"] = out["counts"].get(row["status"] or "not_run", 0) + 1
    if plan.scaling is not None:
        add_efficiency(cells, plan.scaling)
    if plan.error_against is not None:
        add_errors(cells, plan.error_against, _metrics(folder, cells))
    if plan.largest is not None:
        out["largest_that_fits"] = largest_that_fits(cells, plan.largest)
    return out


def _metrics(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rank 0's lines of each cell's first trial."""
    return {
        row["id"]: metrics_of(read_record(folder / row["result"])).get(0, [])
        for row in rows
        if row["result"] is not None and (folder / row["result"]).exists()
    }
