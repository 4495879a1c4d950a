"""Where the results come from: machines and software, each once, and the provenance of every result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mtb_report.report import cells
from mtb_report.report.blocks import Block, Cell, Column, Listing, Section, Table, Text
from mtb_report.report.naming import Named

#: What the table of environments has columns for.
_COLUMNS = {
    "cpu_model", "cpu_cores", "cuda.devices", "python", "torch", "cuda.version", "cuda.nccl", "cuda.driver", "os",
}  # fmt: skip


def section(rows: Sequence[Named]) -> Section | None:
    """Tables of environments and provenance, and what was converted while older files were read."""
    if not rows:
        return None
    groups: dict[str, list[Named]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row.record.environment, sort_keys=True), []).append(row)
    letters = {key: _letter(number) for number, key in enumerate(groups)}
    lettered = [(letters[key], group) for key, group in groups.items()]
    blocks: list[Block] = [
        _environments(lettered),
        *_unlike(lettered),
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


def _unlike(groups: Sequence[tuple[str, Sequence[Named]]]) -> list[Block]:
    """What tells environments apart that the table has no column for, each against the one above it that is most alike.

    What one of two does not record is no difference; a variable that is not there was not set.
    """
    out = []
    for number, (letter, rows) in enumerate(groups):
        others = [(other, _differences(before[0], rows[0])) for other, before in groups[:number]]
        other, found = min(others, key=lambda pair: (sum(map(_has_column, pair[1])), len(pair[1])), default=("", {}))
        more = [text for name, text in found.items() if not _has_column(name)]
        if more:
            out.append(f"{letter} differs from {other} in {'; '.join(more)}")
    return [Text("What the table does not show:"), Listing(out)] if out else []


def _has_column(name: str) -> bool:
    return name in _COLUMNS or name.startswith("libraries.")


def _differences(a: Named, b: Named) -> dict[str, str]:
    """By name, how `b` differs from `a`, in words."""
    left, right = (_flat(row.record.environment) for row in (a, b))
    out = {}
    for name in sorted({*left, *right}):
        variable = name.startswith("variables.")
        x, y = (table.get(name, "not set" if variable else None) for table in (left, right))
        if x != y and x is not None and y is not None:
            out[name] = f"{name.removeprefix('variables.') if variable else name.replace('_', ' ')}: {x} and {y}"
    return out


def _flat(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The values by name, those of a table below its name and a dot."""
    out: dict[str, Any] = {}
    for name, value in environment.items():
        if isinstance(value, Mapping):
            out |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            out[name] = value
    return out


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
