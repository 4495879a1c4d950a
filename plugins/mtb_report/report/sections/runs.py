"""What surrounds the figures of training runs: trials, sharding against DDP, state, stability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtb_report.report import cells, scaling
from mtb_report.report.blocks import Block, Cell, Column, Section, Table
from mtb_report.report.naming import Named
from mtb_report.report.trainings import of_training
from mtb_report.results import Record

_FIGURES = (
    ("tokens_per_sec", "tokens/s", ",.0f"),
    ("step_time_ms", "step ms", ",.3f"),
    ("max_memory_mib", "memory MiB", ",.1f"),
)


def trials(rows: Sequence[Named]) -> Section | None:
    """Mean, spread and confidence interval of runs with several trials."""
    out = []
    population = False
    for row in of_training(rows):
        for figure, title, form in _FIGURES:
            spread = row.record.summary.get(figure)
            if spread is None or (spread.get("n") is not None and spread["n"] < 2):
                continue  # a spread of trials that are not in the file has a number of trials that is not known
            population |= spread.get("std_kind") == "population"
            out.append(_spread_row(row, title, form, spread))
    if not out:
        return None
    titles = ["Mean", "Std", "Min", "Max", "n", "CI low", "CI high", "± of mean"]
    columns = [Column("Run"), Column("Figure"), *(Column(t, numeric=True) for t in titles)]
    notes = [
        "Each trial rebuilds everything. Std is of the sample; the interval is that of the mean at 95%, by Student's t.",
        *(["(pop.): the file has only the population's standard deviation, and no trials."] if population else []),
    ]
    return Section("trials", "Repeated trials", [Table("Spread over trials", columns, out, notes=notes)])


def _spread_row(row: Named, title: str, form: str, spread: Mapping[str, Any]) -> list[Cell]:
    low, high = spread.get("ci95") or (None, None)
    mean, std = spread.get("mean"), cells.of(spread, "std", form)
    share = None if low is None or not mean else (high - low) / 2 / mean
    label = " (pop.)" if spread.get("std_kind") == "population" else ""

    def shown(cell: Cell) -> Cell:
        return cells.measured(row.record, lambda: cell)

    return [
        cells.text(row.name),
        cells.text(title),
        shown(cells.of(spread, "mean", form)),
        shown(Cell(std.text + label, std.sort, std.tone)),
        shown(cells.of(spread, "min", form)),
        shown(cells.of(spread, "max", form)),
        cells.text(spread.get("n")),
        shown(cells.number(low, form)),
        shown(cells.number(high, form)),
        shown(cells.percent(share)),
    ]


def sharding(rows: Sequence[Named]) -> Section | None:
    """Memory saving and step difference of every other strategy against DDP; None where no DDP run is comparable."""
    runs = of_training(rows)
    records = [row.record for row in runs]
    names = {id(row.record): row.name for row in runs}
    found = [
        (row, scaling.against_ddp(row.record, records))
        for row in runs
        if row.record.get("strategy") is not None and not scaling.is_plain(row.record)
    ]
    if all(against.reason == scaling.NO_DDP for _, against in found):
        return None
    out = []
    for row, against in found:
        reason = Cell(against.reason or "unknown", None, "muted")
        base = against.base
        out.append(
            [
                cells.text(row.name),
                cells.number(row.record.get("world_size"), "d"),
                _figure(row.record, base, against.memory_saving, ".1%", reason),
                _figure(row.record, base, against.step_difference, "+.1%", reason),
                reason if base is None else cells.text(names[id(base)]),
            ]
        )
    columns = [
        Column("Run"),
        Column("Ranks", numeric=True),
        Column("Memory saved", numeric=True),
        Column("Step time", numeric=True),
        Column("DDP run"),
    ]
    notes = [
        "Against the DDP run of the same work, batch, precision, device and number of ranks, without ZeRO-1 or compression.",
        "Memory saved: 1 - M / M of DDP, where both mean the same by memory; negative is more memory.",
        "Step time: T / T of DDP - 1; positive is slower.",
    ]
    if any(against.base is not None and row.record.get("memory_kind") == "process_rss" for row, against in found):
        notes.append(
            "Where memory is the resident set of the process, libraries are most of a small model's: its saving says little."
        )
    return Section("sharding", "Memory saved against DDP", [Table("Sharding against DDP", columns, out, notes=notes)])


def _figure(record: Record, base: Record | None, value: float | None, form: str, reason: Cell) -> Cell:
    return cells.measured(record, lambda: reason if base is None or value is None else cells.number(value, form))


def state(rows: Sequence[Named]) -> Section | None:
    """Resuming, checkpoints and restarts, of runs that say something of them."""
    out = []
    for row in of_training(rows):
        runtime = row.record.get("runtime")
        if not runtime:
            continue
        ready = runtime.get("ready_checkpoints")
        resumed = runtime.get("resumed", runtime.get("resume"))
        out.append(
            [
                cells.text(row.name),
                cells.yes_no(resumed),
                Cell("not resumed", None, "muted")
                if resumed is False
                else cells.yes_no(runtime.get("resume_deterministic"), good=True),
                cells.text(runtime.get("resume_determinism_reason")),
                cells.code(_last_part(runtime.get("last_checkpoint"))),
                cells.text(len(ready) if isinstance(ready, list) else ready),
                cells.text(runtime.get("restarts")),
                cells.of(row.record.values, "global_step", ",d"),
                cells.of(row.record.values, "tokens_seen", ",d"),
                cells.text(runtime.get("seed")),
            ]
        )
    if not out:
        return None
    titles = [
        "Run",
        "Resumed",
        "Exact",
        "Reason",
        "Last checkpoint",
        "Ready",
        "Restarts",
        "Global step",
        "Tokens seen",
        "Seed",
    ]
    numeric = {"Ready", "Restarts", "Global step", "Tokens seen", "Seed"}
    table = Table(
        "State at the end",
        [Column(t, numeric=t in numeric) for t in titles],
        out,
        notes=["Exact: the run goes on bitwise as the interrupted one would have."],
    )
    return Section("state", "Runtime state", [table])


def _last_part(path: str | None) -> str | None:
    return path.rstrip("/").rpartition("/")[2] if path else None


def stability(rows: Sequence[Named]) -> Section | None:
    """Schedule, learning rate, gradient norm, clipping and what happens to values that are not finite."""
    runs = of_training(rows)
    if not runs:
        return None
    out = []
    for row in runs:
        record = row.record
        threshold = scaling.setting(record, "max_grad_norm")
        out.append(
            [
                cells.text(row.name),
                cells.text(scaling.setting(record, "lr_scheduler")),
                cells.of(record.values, "learning_rate_start", ".3g"),
                cells.of(record.values, "learning_rate_end", ".3g"),
                cells.of(record.values, "grad_norm", ".4g"),
                cells.of(record.values, "grad_norm_max", ".4g"),
                Cell("none", 0.0) if threshold == 0 else cells.number(threshold),
                cells.of(record.values, "clipped_steps", "g"),
                cells.of(record.values, "skipped_steps", "g"),
                cells.text(record.get("nonfinite_policy")),
                cells.of(record.values, "loss_first", ".4f"),
                cells.of(record.values, "loss", ".4f"),
                cells.of(record.values, "eval_loss", ".4f"),
            ]
        )
    titles = [
        "Run",
        "Schedule",
        "LR first",
        "LR last",
        "Norm mean",
        "Norm max",
        "Clipped above",
        "Clipped",
        "Skipped",
        "Not finite",
        "Loss first",
        "Loss last",
        "Eval loss",
    ]
    text = {"Run", "Schedule", "Not finite"}
    notes = [
        "Norms are global, before clipping, over the measured steps. Clipped and skipped count steps.",
        "Not finite: the policy for a loss or gradient that is not. A figure that was not finite is shown as nan or inf.",
    ]
    blocks: list[Block] = [
        Table(
            "Learning rate, gradients and losses", [Column(t, numeric=t not in text) for t in titles], out, notes=notes
        )
    ]
    return Section("stability", "Stability", blocks)
