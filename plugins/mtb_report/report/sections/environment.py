"""Where the results come from: machines and software, each once, and the provenance of every result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mtb_report.report import cells
from mtb_report.report.blocks import Block, Cell, Column, Listing, Section, Table
from mtb_report.report.naming import Named


def section(rows: Sequence[Named]) -> Section | None:
    """Tables of environments and provenance, and what was converted while older files were read."""
    if not rows:
        return None
    groups: dict[str, list[Named]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row.record.environment, sort_keys=True), []).append(row)
    letters = {key: _letter(number) for number, key in enumerate(groups)}
    blocks: list[Block] = [
        _environments([(letters[key], group) for key, group in groups.items()]),
        _provenance(rows, {row.name: letters[key] for key, group in groups.items() for row in group}),
    ]
    conversions = list(dict.fromkeys(note for row in rows for note in row.record.conversions))
    if conversions:
        blocks.append(Listing([f"Read from an older schema. {note}" for note in conversions]))
    return Section("environment", "Environment and provenance", blocks)


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"{chr(ord('A') + number % 26)}{number // 26}"


def _environments(groups: Sequence[tuple[str, Sequence[Named]]]) -> Table:
    columns = [
        "Environment",
        "Results",
        "Processor",
        "Cores",
        "GPUs",
        "Python",
        "torch",
        "CUDA",
        "NCCL",
        "Driver",
        "System",
        "Libraries",
    ]
    out = []
    for letter, rows in groups:
        known = rows[0].record.environment
        cuda: Mapping[str, Any] = known.get("cuda") or {}
        libraries = known.get("libraries") or {}
        none = Cell("none", None, "muted") if known and known.get("cuda") is None else cells.UNKNOWN
        out.append(
            [
                cells.text(letter),
                cells.number(len(rows), "d"),
                cells.text(known.get("cpu_model")),
                cells.text(known.get("cpu_cores")),
                _devices(cuda) or none,
                cells.text(known.get("python")),
                cells.text(known.get("torch")),
                *(cells.text(cuda.get(key)) if cuda else none for key in ("version", "nccl", "driver")),
                cells.text(known.get("os")),
                cells.text(", ".join(f"{name} {version}" for name, version in libraries.items() if version)),
            ]
        )
    return Table("Environments", [Column(name, numeric=name in ("Results", "Cores")) for name in columns], out)


def _devices(cuda: Mapping[str, Any]) -> Cell | None:
    names = [device.get("name") or "unknown" for device in cuda.get("devices") or ()]
    return cells.text(", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))) if names else None


def _provenance(rows: Sequence[Named], letters: Mapping[str, str]) -> Table:
    names = ["Result", "Kind", "Environment", "Revision", "Changed", "Image", "Complete", "Missing", "Command"]
    out = []
    for row in rows:
        known = row.record.provenance
        missing = known.get("missing_fields")
        out.append(
            [
                cells.text(row.name),
                cells.text(row.record.kind),
                cells.text(letters[row.name]),
                cells.code(known.get("git_revision"), 12),
                cells.yes_no(known.get("git_dirty"), good=False),
                cells.code(known.get("image_id"), 19),
                cells.yes_no(known.get("complete"), good=True),
                cells.UNKNOWN if missing is None else cells.text(list(missing)),
                cells.code(known.get("command")),
            ]
        )
    note = "Changed: the working tree had changes that the revision does not hold. Missing: what applies and was not recorded."
    return Table("Provenance", [Column(name) for name in names], out, notes=[note])
