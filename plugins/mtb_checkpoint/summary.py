"""What ``mtb checkpoint list`` and ``show`` tell; torch-free."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtb_core.api.errors import PluginError
from mtb_core.ckpt.catalog import list_steps, read_latest
from mtb_core.ckpt.entries import TensorEntry
from mtb_core.ckpt.layout import LEGACY_MANIFEST, DamagedCheckpoint, is_legacy, name_problem
from mtb_core.ckpt.manifest import OLD_DISTRIBUTION, OLD_FORMAT, read_manifest
from mtb_core.ckpt.opened import Opened, read_json, storage_of
from mtb_core.ckpt.storage import storage_named


def summarize_folder(folder: Path) -> dict[str, Any]:
    """Every step folder in a folder of checkpoints, READY or not, and what ``latest`` names."""
    latest = read_latest(folder)
    rows = []
    for found in list_steps(folder):
        values, problem = _values(found.path, found.step)
        created = _typed(values, "created_at", str)
        rows.append(
            {
                "step": found.step,
                "name": found.path.name,
                "ready": found.ready,
                "latest": found.path == latest,
                "size_bytes": _size(found.path),
                "created_at": created,
                "age_s": _age(created),
                "strategy": _typed(values, "strategy", str),
                "world_size": _typed(values, "world_size", int),
                "deterministic": _typed(values, "deterministic", bool),
                "format_version": _typed(values, "format_version", int),
                "problem": problem,
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


def _values(path: Path, step: int) -> tuple[Mapping[str, Any], str | None]:
    """(what the step folder says of itself, what is wrong with it as far as its small files tell)."""
    values: Mapping[str, Any] = {}
    try:
        if path.is_symlink():
            return {}, "it is a symbolic link, which is no step of this folder"
        if not path.is_dir():
            return {}, "it is not a folder"
        if is_legacy(path):
            values = read_json(path, LEGACY_MANIFEST)
            storage_named(OLD_FORMAT, distribution=OLD_DISTRIBUTION)
            return values, None
        manifest = read_manifest(path)
        values = manifest.values
        storage_of(manifest)
    except DamagedCheckpoint as error:
        return {}, f"{error.file}: {error.problem}"
    except OSError as error:
        return {}, error.strerror or str(error)
    except PluginError as error:
        return values, str(error)
    return values, name_problem(path, step)


def _typed(values: Mapping[str, Any], key: str, kind: type) -> Any:
    """The value of `key`, or None where it is of another type (the older formats are not checked as a whole)."""
    return values[key] if type(values.get(key)) is kind else None


def _size(path: Path) -> int:
    """Bytes of the regular files in a folder, as far as they can be seen; links are not followed."""
    if path.is_symlink():
        return 0
    total = 0
    for top, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # removed by another process in the meantime
                status = (Path(top) / name).lstat()
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _age(created: Any) -> float | None:
    try:
        return (dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(created)).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return None
