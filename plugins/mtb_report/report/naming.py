"""What a record is called in a report: short where that is enough, never the same for two records of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from mtb_report.results import Record


@attrs.frozen
class Named:
    """A record and its name, unique among the records of the same kind."""

    name: str
    record: Record


def named(records: Sequence[Record]) -> list[Named]:
    """All `records` in their order; where labels are alike, as much of the file's place follows as tells them apart."""
    alike: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        alike.setdefault((record.kind, label_of(record)), []).append(record)
    places = {id(r): p for group in alike.values() for r, p in zip(group, _places(group), strict=True)}
    return [Named(_name(label_of(r), places[id(r)]), r) for r in records]


def label_of(record: Record) -> str:
    """What ran, on how many ranks; a comparison of two checkpoints has a number of ranks on each side, and no such name."""
    return record.label if isinstance(record.get("world_size"), int | None) else record.kind


def _name(label: str, place: str) -> str:
    if not place:
        return label
    return place if place.startswith(label) else f"{label} · {place}"


def _places(records: Sequence[Record]) -> list[str]:
    """The last parts of each path, as many as make all of them different; never more, for a path tells of a machine."""
    if len(records) == 1:
        return [""]
    parts = [_parts(record.path) for record in records]
    for length in range(1, max(map(len, parts)) + 1):
        short = ["/".join(part[-length:]) for part in parts]
        if len(set(short)) == len(short):
            return short
    return [f"{'/'.join(part[-1:])} ({number})" for number, part in enumerate(parts, 1)]


def _parts(path: Path) -> tuple[str, ...]:
    """Without what the name of every result has: ``result.json``, a sweep's ``run``, the suffix."""
    short = path.parent if path.name in ("result.json", "sweep.json") else path.with_suffix("")
    short = short.parent if short.name == "run" else short
    return short.parts[1:] or short.parts
