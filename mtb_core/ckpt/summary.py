"""What ``mtb checkpoint list`` and ``show`` tell; torch-free."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .catalog import list_steps, read_latest
from .layout import LEGACY_MANIFEST, DamagedCheckpoint
from .manifest import read_manifest
from .metadata import TensorEntry
from .opened import Opened, read_json


def summarize_folder(folder: Path) -> dict[str, Any]:
    """Every step folder in a folder of checkpoints, READY or not, and what ``latest`` names."""
    latest = read_latest(folder)
    rows = []
    for found in list_steps(folder):
        values = _values(found.path)
        created = values.get("created_at")
        rows.append(
            {
                "step": found.step,
                "name": found.path.name,
                "ready": found.ready,
                "latest": found.path == latest,
                "size_bytes": _size(found.path),
                "created_at": created,
                "age_s": _age(created),
                "strategy": values.get("strategy"),
                "world_size": values.get("world_size"),
                "deterministic": values.get("deterministic"),
                "format_version": values.get("format_version"),
            }
        )
    return {"folder": str(folder), "latest": latest.name if latest else None, "checkpoints": rows}


def describe(opened: Opened) -> dict[str, Any]:
    """Metadata and tensors of one checkpoint."""
    tensors = [_tensor(key, entry) for key, entry in sorted(opened.entries.items())]
    return {
        "path": str(opened.path),
        "format_version": opened.version,
        "metadata": dict(opened.values),
        "sections": dict(opened.sections),
        "tensors": tensors,
        "tensor_bytes": sum(t["size_bytes"] for t in tensors),
    }


def _tensor(key: str, entry: TensorEntry) -> dict[str, Any]:
    parts = [{"file": c.file, "offset": list(c.offset), "sizes": list(c.sizes)} for c in entry.chunks]
    placement = "whole" if len(parts) == 1 else f"{len(parts)} parts along {_axes(entry)}"
    return {
        "name": key,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "size_bytes": entry.nbytes,
        "placement": placement,
        "parts": parts,
    }


def _axes(entry: TensorEntry) -> str:
    """The dimensions along which a tensor is cut."""
    cut = [d for d in range(len(entry.shape)) if any(c.sizes[d] != entry.shape[d] for c in entry.chunks)]
    return "dim " + ", ".join(map(str, cut))


def _values(path: Path) -> Mapping[str, Any]:
    try:
        return read_manifest(path).values
    except DamagedCheckpoint:
        pass
    try:
        return read_json(path, LEGACY_MANIFEST)
    except DamagedCheckpoint:
        return {}


def _size(path: Path) -> int:
    return sum(p.lstat().st_size for p in path.rglob("*") if p.is_file() and not p.is_symlink())


def _age(created: Any) -> float | None:
    try:
        return (dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(created)).total_seconds()
    except (TypeError, ValueError):
        return None
