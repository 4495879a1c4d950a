"""``manifest.json``, the list of everything in a checkpoint, and ``READY``, its commit mark."""

# ruff: noqa: TRY004  (a wrong type in a file is a wrong value)

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from . import files
from .layout import MANIFEST, READY, SMALL_FILE_BYTES, DamagedCheckpoint, dump_json, parse_json

#: Format that is written. See `mtb_core.ckpt.versions` for the older ones that are read.
FORMAT_VERSION = 3

#: Keys that the reader relies on, with their types.
_REQUIRED: dict[str, type | tuple[type, ...]] = {
    "format_version": int,
    "step": int,
    "sequence": int,
    "world_size": int,
    "deterministic": bool,
    "determinism_reason": (str, type(None)),
    "digest_algorithm": str,
    "files": dict,
}


@attrs.frozen
class FileEntry:
    """Size in bytes and digest (hexadecimal) of one file."""

    size: int
    digest: str


@attrs.frozen
class Manifest:
    """What a checkpoint says of itself. `values`: everything in ``manifest.json`` except the list of files."""

    values: Mapping[str, Any]
    files: Mapping[str, FileEntry]

    @property
    def step(self) -> int:
        """Global step after which it was taken."""
        return int(self.values["step"])

    @property
    def sequence(self) -> int:
        """Number of the publication in its folder, counted from 1: says which of two was published later."""
        return int(self.values["sequence"])

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return int(self.values["world_size"])

    def to_bytes(self) -> bytes:
        """Content of ``manifest.json``."""
        listed = {name: attrs.asdict(entry) for name, entry in self.files.items()}
        return dump_json({**self.values, "digest_algorithm": files.ALGORITHM, "files": listed})


def ready_text(digest: str) -> bytes:
    """Content of ``READY`` for a manifest with this digest."""
    return f"{MANIFEST} {files.ALGORITHM}:{digest}\n".encode()


def check_ready(path: Path) -> bytes:
    """The bytes of the manifest of the checkpoint at `path`, after comparing them with ``READY``.

    Raises:
        DamagedCheckpoint: either file is missing, unreadable, or they do not fit.
    """
    ready = _small(path, READY, 4096)
    if not ready.strip():
        raise DamagedCheckpoint(path, READY, "it is empty, so the save was never completed")
    text = _small(path, MANIFEST, SMALL_FILE_BYTES)
    if ready != ready_text(files.digest_bytes(text)):
        raise DamagedCheckpoint(
            path, MANIFEST, f"its digest is not the one that {READY} names; one of the two was changed"
        )
    return text


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, checked against ``READY`` and for form.

    Raises:
        DamagedCheckpoint: see `check_ready`; or not a manifest of this format.
    """
    text = check_ready(path)
    try:
        return _parse(parse_json(text))
    except ValueError as error:
        raise DamagedCheckpoint(path, MANIFEST, str(error)) from error


def _parse(values: Any) -> Manifest:
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    version = values.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(
            f"its format version {version} is newer than {FORMAT_VERSION}, the newest known here; update mtb-core"
        )
    for key, kind in _REQUIRED.items():
        value = values.get(key)
        if key not in values or not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"the value of {key!r} is missing or of the wrong type")
    if version != FORMAT_VERSION:
        raise ValueError(f"its format version is {version}; {FORMAT_VERSION} is expected in {MANIFEST}")
    if values["digest_algorithm"] != files.ALGORITHM:
        raise ValueError(f"its digests are by {values['digest_algorithm']!r}; known here: {files.ALGORITHM}")
    if not 1 <= values["world_size"] <= 1 << 24 or values["step"] < 0:
        raise ValueError(f"world_size {values['world_size']} or step {values['step']} is out of range")
    listed = values.pop("files")
    return Manifest(values, {name: _entry(name, entry) for name, entry in listed.items()})


def _entry(name: str, entry: Any) -> FileEntry:
    files.safe_parts(name)
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of {name!r} is not an object")
    size, digest = entry.get("size"), entry.get("digest")
    if type(size) is not int or size < 0:
        raise ValueError(f"the size of {name!r} is missing or not a number of bytes")
    if not isinstance(digest, str) or len(digest) != 32 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"the digest of {name!r} is missing or not {files.ALGORITHM}")
    return FileEntry(size, digest)


def _small(path: Path, name: str, limit: int) -> bytes:
    try:
        return files.read_small(path, name, limit)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, name, "it is missing") from error
    except OSError as error:
        raise DamagedCheckpoint(path, name, error.strerror or str(error)) from error
    except ValueError as error:
        raise DamagedCheckpoint(path, name, str(error)) from error
