"""One checkpoint, opened for reading: the same view of every format version. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from . import files
from .entries import TensorEntry
from .layout import (
    MANIFEST,
    README,
    SMALL_FILE_BYTES,
    STATE,
    DamagedCheckpoint,
    is_legacy,
    name_problem,
    parse_json,
    rng_name,
)
from .manifest import (
    OLD_DISTRIBUTION,
    OLD_FORMAT,
    OLDEST_VERSION,
    FileEntry,
    Manifest,
    check_sections,
    read_manifest,
    reading,
)
from .storage import Storage, storage_named
from .tensors import TensorFiles

if TYPE_CHECKING:
    from mtb_core.registry.discovery import Registry

#: Largest random state that is read.
RNG_BYTES = 1 << 20


@attrs.frozen
class Opened:
    """A published checkpoint.

    Attributes:
        version: its format version.
        storage: the checkpoint format of its tensors.
        values: the manifest without the list of files.
        manifest: None for the older formats, which list no files.
        sections: content of ``state.json``; None for a section that this format has not.
        entries: its tensors.
    """

    path: Path
    version: int
    storage: Storage
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
        return self.storage.reader(self.path, self.entries)

    def check_files(self, names: Sequence[str]) -> None:
        """Compare size and digest of the files `names` with the manifest.

        Raises:
            DamagedCheckpoint: the first that differs.
        """
        assert self.manifest is not None
        for name in names:
            _check_file(self.path, name, self.manifest.files[name])


def open_checkpoint(path: Path, registry: Registry | None = None) -> Opened:
    """Read the small files of the checkpoint at `path`: manifest, ``state.json``, index of the tensors.

    Args:
        path: the step folder.
        registry: the plugins in which its checkpoint format is looked for; None: all that are installed.

    Raises:
        DamagedCheckpoint: one of them is missing or not what was published.
        PluginError: no plugin has the format of its tensors.
    """
    if is_legacy(path):
        from .versions import open_legacy  # noqa: PLC0415  (builds on this module)

        return open_legacy(path, storage_named(OLD_FORMAT, registry, OLD_DISTRIBUTION))
    manifest = read_manifest(path)
    if problem := name_problem(path, manifest.step):
        raise DamagedCheckpoint(path, MANIFEST, problem)
    storage = storage_of(manifest, registry)
    for name in unlisted(manifest, storage):
        raise DamagedCheckpoint(path, MANIFEST, f"it does not list {name}")
    opened = Opened(path, int(manifest.values["format_version"]), storage, manifest.values, manifest, {}, {})
    opened.check_files([STATE, *storage.index_files])
    sections = read_json(path, STATE)
    with reading(path, STATE):
        check_sections(sections, manifest.step)
    entries = storage.entries(path)
    strange = {c.file for e in entries.values() for c in e.chunks} - manifest.files.keys()
    if strange:
        raise DamagedCheckpoint(
            path, storage.index_files[0], f"it refers to files that the manifest does not list: {sorted(strange)}"
        )
    return attrs.evolve(opened, sections=sections, entries=entries)


def read_rng(opened: Opened, rank: int) -> Mapping[str, Any]:
    """The random state that `rank` saved.

    Raises:
        DamagedCheckpoint: missing, damaged, or of format 1, which has none.
    """
    if opened.version < OLDEST_VERSION:
        from .versions import legacy_rng  # noqa: PLC0415  (builds on this module)

        return legacy_rng(opened.path, rank)
    opened.check_files([rng_name(rank)])
    return read_json(opened.path, rng_name(rank), RNG_BYTES)


def storage_of(manifest: Manifest, registry: Registry | None = None) -> Storage:
    """The checkpoint format of a checkpoint's tensors.

    Raises:
        PluginError: no plugin in `registry` (None: of those installed) has it.
    """
    name, distribution = manifest.storage
    return storage_named(name, registry, distribution)


def unlisted(manifest: Manifest, storage: Storage) -> list[str]:
    """Names that the manifest should list and does not; it never lists itself and ``READY``."""
    ranks = range(manifest.world_size)
    required = [*storage.index_files, STATE, README, *map(storage.file, ranks), *map(rng_name, ranks)]
    return [name for name in required if name not in manifest.files]


def file_problem(path: Path, name: str, manifest: Manifest) -> str | None:
    """Error text if a listed file is not as listed; None if it is. Reads the file through one small buffer."""
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
