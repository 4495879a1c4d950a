"""One checkpoint, opened for reading: the same view of every format version. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from . import files
from .layout import (
    MANIFEST,
    METADATA,
    README,
    SMALL_FILE_BYTES,
    STATE,
    DamagedCheckpoint,
    is_legacy,
    name_problem,
    parse_json,
    rng_name,
    shard_name,
)
from .manifest import FORMAT_VERSION, FileEntry, Manifest, check_sections, read_manifest, reading
from .metadata import TensorEntry, parse_metadata
from .tensors import TensorFiles

#: Largest ``.metadata`` and largest random state that are read.
METADATA_BYTES = 1 << 30
RNG_BYTES = 1 << 20


@attrs.frozen
class Opened:
    """A published checkpoint.

    Attributes:
        version: its format version.
        values: the manifest without the list of files.
        manifest: None for the older formats, which list no files.
        sections: content of ``state.json``; None for a section that this format has not.
        entries: its tensors.
    """

    path: Path
    version: int
    values: Mapping[str, Any]
    manifest: Manifest | None
    sections: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]

    @property
    def step(self) -> int:
        """Global step after which it was taken."""
        return int(self.values["step"])

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return int(self.values["world_size"])

    def tensors(self) -> TensorFiles:
        """Reader of the tensors, to be used as a context manager."""
        return TensorFiles(self.path, self.entries)

    def check_files(self, names: Sequence[str]) -> None:
        """Compare size and digest of the files `names` with the manifest.

        Raises:
            DamagedCheckpoint: the first that differs.
        """
        assert self.manifest is not None
        for name in names:
            _check_file(self.path, name, self.manifest.files[name])


def open_checkpoint(path: Path) -> Opened:
    """Read the small files of the checkpoint at `path`: manifest, ``state.json``, ``.metadata``.

    Raises:
        DamagedCheckpoint: one of them is missing or not what was published.
    """
    if is_legacy(path):
        from .versions import open_legacy  # noqa: PLC0415  (builds on this module)

        return open_legacy(path)
    manifest = read_manifest(path)
    if problem := name_problem(path, manifest.step):
        raise DamagedCheckpoint(path, MANIFEST, problem)
    for name in required_files(manifest.world_size):
        if name not in manifest.files:
            raise DamagedCheckpoint(path, MANIFEST, f"it does not list {name}")
    opened = Opened(path, int(manifest.values["format_version"]), manifest.values, manifest, {}, {})
    opened.check_files([STATE, METADATA])
    sections = read_json(path, STATE)
    with reading(path, STATE):
        check_sections(sections, manifest.step)
    entries, others = read_entries(path)
    if others:
        raise DamagedCheckpoint(path, METADATA, f"it has entries that are not tensors: {', '.join(others[:3])}")
    strange = {c.file for e in entries.values() for c in e.chunks} - manifest.files.keys()
    if strange:
        raise DamagedCheckpoint(
            path, METADATA, f"it refers to files that the manifest does not list: {sorted(strange)}"
        )
    return attrs.evolve(opened, sections=sections, entries=entries)


def read_rng(opened: Opened, rank: int) -> Mapping[str, Any]:
    """The random state that `rank` saved.

    Raises:
        DamagedCheckpoint: missing, damaged, or of format 1, which has none.
    """
    if opened.version < FORMAT_VERSION:
        from .versions import legacy_rng  # noqa: PLC0415  (builds on this module)

        return legacy_rng(opened.path, rank)
    opened.check_files([rng_name(rank)])
    return read_json(opened.path, rng_name(rank), RNG_BYTES)


def required_files(world_size: int) -> list[str]:
    """What a checkpoint of so many ranks has at least, besides the manifest and ``READY``."""
    ranks = range(world_size)
    return [METADATA, STATE, README, *(shard_name(r) for r in ranks), *(rng_name(r) for r in ranks)]


def file_problem(path: Path, name: str, manifest: Manifest) -> str | None:
    """What is wrong with one listed file, or None. Reads the file in one small buffer."""
    try:
        _check_file(path, name, manifest.files[name])
    except DamagedCheckpoint as error:
        return error.problem
    return None


def _check_file(path: Path, name: str, entry: FileEntry) -> None:
    with reading(path, name):
        descriptor = files.open_inside(path, name)
        try:
            size = os.fstat(descriptor).st_size
            if size != entry.size:
                raise ValueError(f"it has {size} bytes; {entry.size} were written")
            if files.digest_file(descriptor) != entry.digest:
                raise ValueError("its content is not what was written: the digest differs")
        finally:
            os.close(descriptor)


def read_json(path: Path, name: str, limit: int = SMALL_FILE_BYTES) -> dict[str, Any]:
    """A JSON object of a checkpoint.

    Raises:
        DamagedCheckpoint: missing, unreadable or something else.
    """
    with reading(path, name):
        values = parse_json(files.read_small(path, name, limit))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")  # noqa: TRY004  (a wrong type in a file is a wrong value)
        return values


def read_entries(path: Path) -> tuple[Mapping[str, TensorEntry], tuple[str, ...]]:
    """The tensors in ``.metadata``, and the keys of what is not a tensor there.

    Raises:
        DamagedCheckpoint: missing, unreadable, or not an index of tensors.
    """
    with reading(path, METADATA):
        index = parse_metadata(files.read_small(path, METADATA, METADATA_BYTES))
    return index.tensors, index.others
