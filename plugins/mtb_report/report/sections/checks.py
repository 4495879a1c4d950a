"""Checks that hold or do not: tensor parallelism, checkpoints, conformance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtb_report.report import cells
from mtb_report.report.blocks import Block, Cell, Column, Section, Table
from mtb_report.report.naming import Named

_TENSOR_PARALLEL = {"tensor_parallel": "check", "tensor_parallel_mlp": "mlp", "sequence_parallel": "sequence"}


def tensor_parallel(rows: Sequence[Named]) -> Section | None:
    """Errors of sharded layers against one process."""
    found = [row for row in rows if row.record.kind in _TENSOR_PARALLEL]
    if not found:
        return None
    checks = []
    errors = []
    for row in found:
        record = row.record
        listed: Mapping[str, Any] = record.get("errors") or {}
        checks.append(
            [
                cells.text(row.name),
                cells.text(record.get("check") or _TENSOR_PARALLEL[record.kind]),
                cells.text(record.get("tp_degree")),
                cells.text(record.get("dtype")),
                cells.number(_worst(listed), ".2e"),
                cells.number(record.get("atol"), ".2e") if record.get("atol") is not None else _tolerance(listed),
                _count(record.get("collective_count"), record.get("collectives")),
                _count(record.get("communication_bytes"), None),
                cells.status(record.get("status")),
            ]
        )
        errors += [
            [cells.text(row.name), cells.text(quantity), *_error(error, record.get("atol"))]
            for quantity, error in listed.items()
        ]
    titles = ["Check", "Kind", "TP ranks", "Dtype", "Largest error", "Allowed", "Collectives", "Bytes", "Status"]
    text = {"Check", "Kind", "Dtype", "Status"}
    blocks: list[Block] = [
        Table(
            "Checks",
            [Column(t, numeric=t not in text) for t in titles],
            checks,
            notes=[
                "Against the same layer on one process. Collectives and bytes are of one rank, all cases of the check together."
            ],
        ),
    ]
    if errors:
        columns = [
            Column("Check"),
            Column("Quantity"),
            Column("Absolute", numeric=True),
            Column("Relative", numeric=True),
            Column("Allowed", numeric=True),
            Column("Status"),
        ]
        blocks.append(Table("Errors by quantity", columns, errors))
    return Section("tensor-parallel", "Tensor parallelism", blocks)


def _value(error: Any) -> float | None:
    found = error.get("max_abs_error") if isinstance(error, Mapping) else error
    return found if isinstance(found, int | float) else None


def _worst(errors: Mapping[str, Any]) -> float | None:
    known = [value for value in map(_value, errors.values()) if value is not None]
    return max(known, default=None)


def _tolerance(errors: Mapping[str, Any]) -> Cell:
    known = {e["tolerance"] for e in errors.values() if isinstance(e, Mapping) and e.get("tolerance") is not None}
    return cells.number(max(known), ".2e") if known else cells.UNKNOWN


def _error(error: Any, allowed: float | None) -> list[Cell]:
    if isinstance(error, Mapping):
        return [
            cells.of(error, "max_abs_error", ".2e"),
            cells.of(error, "max_rel_error", ".2e"),
            cells.of(error, "tolerance", ".2e"),
            cells.status(error.get("status")),
        ]
    verdict = None if error is None or allowed is None else "ok" if error <= allowed else "failed"
    return [cells.number(error, ".2e"), cells.UNKNOWN, cells.number(allowed, ".2e"), cells.status(verdict)]


def _count(number: Any, nested: Any) -> Cell:
    """A number, or the sum of those inside nested mappings."""
    total = _total(number if number is not None else nested)
    return cells.number(total, ",d") if total is not None else cells.UNKNOWN


def _total(value: Any) -> int | None:
    if isinstance(value, Mapping):
        parts = [part for part in map(_total, value.values()) if part is not None]
        return sum(parts) if parts else None
    return value if isinstance(value, int) else None


def verification(rows: Sequence[Named]) -> Section | None:
    """Whether checkpoints are as they were published, and whether two hold the same state; those of drills too."""
    found = [(row.name, row.record.values) for row in rows if row.record.kind == "checkpoint_verification"]
    found += [
        (f"{row.name}: verification", row.record.get("verification"))
        for row in rows
        if row.record.kind == "fault_tolerance" and row.record.get("verification")
    ]
    alone = [(name, values) for name, values in found if "exact_match" not in values]
    compared = [(name, values) for name, values in found if "exact_match" in values]
    blocks = [*([_compared(compared)] if compared else []), *([_integrity(alone)] if alone else [])]
    return Section("verification", "Checkpoint verification", blocks) if blocks else None


def _compared(found: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    parts = list(dict.fromkeys(part for _, values in found for part in matches_of(values)))
    out = [
        [
            cells.text(name),
            cells.code(_short(values.get("left"))),
            cells.code(_short(values.get("right"))),
            *(cells.yes_no(matches_of(values).get(part), good=True) for part in parts),
            cells.yes_no(values.get("exact_match"), good=True),
            cells.text(values.get("left_determinism_reason")),
            cells.text("; ".join(values["reasons"]) or "none")
            if isinstance(values.get("reasons"), list)
            else cells.UNKNOWN,
        ]
        for name, values in found
    ]
    titles = [
        "Verification",
        "Left",
        "Right",
        *(p.replace("_", " ") for p in parts),
        "Exact",
        "Determinism",
        "Differences",
    ]
    note = "A part is equal if both sides hold the same to the bit. Exact: all parts are."
    return Table("The same training state?", [Column(t) for t in titles], out, notes=[note])


def _integrity(found: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    out = []
    for name, values in found:
        problems = [
            f"{p.get('file')}: {p.get('problem')}" for p in values.get("problems") or () if isinstance(p, Mapping)
        ]
        out.append(
            [
                cells.text(name),
                cells.code(_short(values.get("path"))),
                cells.of(values, "step", "d"),
                cells.of(values, "files", ",d"),
                cells.of(values, "size_bytes", ",d"),
                cells.yes_no(values.get("ok"), good=True),
                cells.text("; ".join(problems) or "none"),
            ]
        )
    titles = ["Verification", "Checkpoint", "Step", "Files", "Bytes", "Sound", "Problems"]
    return Table("As it was published?", [Column(t, numeric=t in ("Step", "Files", "Bytes")) for t in titles], out)


def matches_of(values: Mapping[str, Any]) -> Mapping[str, bool]:
    """Whether each part of two checkpoints is equal, by name."""
    found = values.get("matches")
    if isinstance(found, Mapping):
        return found
    sections = values.get("sections") or {}
    return {name: bool(part.get("exact")) for name, part in sections.items() if isinstance(part, Mapping)}


def _short(path: str | None) -> str | None:
    return "/".join(path.rstrip("/").split("/")[-2:]) if path else None


def conformance(rows: Sequence[Named]) -> Section | None:
    """Certificates of strategies, and every check that failed."""
    found = [row for row in rows if row.record.kind == "conformance"]
    if not found:
        return None
    certificates = []
    for row in found:
        record = row.record
        options = record.get("strategy_options") or {}
        verdict = _verdict(record.get("conformant"), record.get("failed"))
        certificates.append(
            [
                cells.text(row.name),
                cells.text(", ".join(f"{k}={v}" for k, v in options.items()) or "defaults"),
                cells.text(record.get("distribution")),
                cells.text(record.get("version")),
                cells.text(record.get("world_sizes")),
                *(cells.of(record.values, key, "d") for key in ("passed", "failed", "skipped")),
                cells.code(record.get("kit_digest"), 16),
                cells.text((record.get("versions") or {}).get("torch")),
                cells.status(verdict),
            ]
        )
    titles = [
        "Strategy",
        "Options",
        "Distribution",
        "Version",
        "Ranks",
        "Passed",
        "Failed",
        "Skipped",
        "Kit",
        "torch",
        "Verdict",
    ]
    blocks: list[Block] = [
        Table(
            "Certificates",
            [Column(t, numeric=t in ("Passed", "Failed", "Skipped")) for t in titles],
            certificates,
            notes=[
                "A strategy is conformant when every check of the kit was run at every declared number of ranks, and none failed."
            ],
        )
    ]
    failed = [
        [
            cells.text(row.name),
            *(cells.text(check.get(key)) for key in ("name", "ranks", "expected", "seen", "mistake")),
        ]
        for row in found
        for check in row.record.rows
        if check.get("status") == "failed"
    ]
    if failed:
        columns = ("Strategy", "Check", "Ranks", "Expected", "Seen", "Likely mistake")
        blocks.append(Table("Checks that failed", [Column(t, numeric=t == "Ranks") for t in columns], failed))
    return Section("conformance", "Conformance", blocks)


def _verdict(conformant: bool | None, failed: int | None) -> str | None:
    if conformant is None:
        return None
    return "conformant" if conformant else "not conformant" if failed else "incomplete"
