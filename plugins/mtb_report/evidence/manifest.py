"""A manifest of results: what there is, by digest, in batches of one environment and one source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from mtb_core import dumps, redact
from mtb_evidence import provenance
from mtb_report.results import Found, Record, find_records

SCHEMA_VERSION = 1

#: Of an environment, what is a run's own setting and no property of the place.
_SETTINGS = ("torch_threads", "variables")
_COLLECTIONS = ("sweep", "comparison", "evidence_manifest", "megatron_matrix")
_SOURCE = ("git_revision", "git_dirty", "git_diff_digest", "build_revision", "image_ref", "image_id", "base_image")


def batch_key(record: Record) -> str | None:
    """SHA-256 of where `record` was measured and from what source; equal for results that are of one batch.

    None for what is not measured itself but put together of results: a sweep, a comparison.
    """
    if not record.environment and record.kind in _COLLECTIONS:
        return None
    return _digest({"environment": _place(record), "source": _source(record)})


def make_manifest(folder: Path, found: Found, argv: Sequence[str]) -> dict[str, Any]:
    """The manifest of the results `found` in `folder`; every key is described in ``docs/evidence.md``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "evidence_manifest",
        **_said_of(folder, found.records),
        "unreadable": [{"path": _relative(folder, file), "reason": redact(why)} for file, why in found.unreadable],
        "provenance": provenance(argv),
    }


def _said_of(folder: Path, records: Sequence[Record]) -> dict[str, Any]:
    """What a manifest says of `records`: each of them, and its batch."""
    entries = [_entry(folder, record) for record in records]
    batches: dict[str, dict[str, Any]] = {}
    for record, entry in zip(records, entries, strict=True):
        if entry["batch"] is None:
            continue
        batch = batches.setdefault(
            entry["batch"],
            {"id": entry["batch"], "environment": _place(record), "source": _source(record), "results": []},
        )
        batch["results"].append(entry["path"])
    return {"one_batch": len(batches) <= 1, "batches": list(batches.values()), "results": entries}


def _entry(folder: Path, record: Record) -> dict[str, Any]:
    return {
        "path": _relative(folder, record.path),
        "sha256": record.digest,
        "kind": record.kind,
        "label": record.label,
        "status": record.status,
        "execution_complete": record.execution_complete,
        "performance_valid": record.performance_valid,
        "performance_invalid_reasons": list(record.performance_invalid_reasons),
        "command": record.provenance.get("command") or record.get("command"),
        "git_revision": record.provenance.get("git_revision"),
        "git_dirty": record.provenance.get("git_dirty"),
        "provenance_complete": record.provenance.get("complete"),
        "missing_fields": record.provenance.get("missing_fields"),
        "environment": _digest(_place(record)),
        "batch": batch_key(record),
    }


def shape_error(manifest: Mapping[str, Any]) -> str | None:
    """What makes a document that says that it is a manifest none that can be checked; None where nothing does."""
    results = manifest.get("results")
    if not isinstance(results, list):
        return f"results is {results!r}, but must be a list"
    for number, entry in enumerate(results):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("path", "sha256")):
            return f"results[{number}] must be a table with the texts path and sha256"
        path = PurePath(entry["path"])
        if path.is_absolute() or ".." in path.parts or "\0" in entry["path"]:
            return f"results[{number}] has the path {entry['path']!r}, which is not below the folder"
    return None


def check_manifest(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """What is not as `manifest` says, in words: changed, removed and added results, and what it says else of them.

    `manifest` has no `shape_error`.
    """
    wrong = []
    for entry in manifest["results"]:
        try:
            digest = hashlib.sha256((folder / entry["path"]).read_bytes()).hexdigest()
        except OSError as error:
            wrong.append(f"{entry['path']} cannot be read: {error.strerror}")
            continue
        if digest != entry["sha256"]:
            wrong.append(f"{entry['path']} was changed")
    records = [record for record in find_records([folder]).records if record.kind != "evidence_manifest"]
    listed = {entry["path"] for entry in manifest["results"]}
    paths = [_relative(folder, record.path) for record in records]
    wrong += [f"{path} was added" for path in paths if path not in listed]
    return wrong or _untrue(manifest, json.loads(dumps(_said_of(folder, records))))


def _untrue(manifest: Mapping[str, Any], true: Mapping[str, Any]) -> list[str]:
    """What `manifest` says that the results, which are those that it lists, do not."""
    entries = {entry["path"]: entry for entry in true["results"]}
    wrong = []
    for entry in manifest["results"]:
        own = entries.get(entry["path"], {})
        keys = [key for key, value in own.items() if key in entry and entry[key] != value]
        if keys:
            wrong.append(f"of {entry['path']} the manifest says another {', '.join(keys)} than the result")
    for key in ("one_batch", "batches"):
        if not wrong and manifest.get(key) != true[key]:
            wrong.append(f"{key} does not follow from the results: the manifest itself was changed")
    return wrong


def _place(record: Record) -> dict[str, Any]:
    return {k: v for k, v in record.environment.items() if k not in _SETTINGS}


def _source(record: Record) -> dict[str, Any]:
    return {name: record.provenance.get(name) for name in _SOURCE}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _relative(folder: Path, file: Path) -> str:
    return str(file.relative_to(folder)) if file.is_relative_to(folder) else file.name
