"""Checkpoint formats: how tensors lie in files, and how they are found again. Torch-free.

A format lays out and reads, nothing else. Who writes which part, copying while training waits, writing beside it,
fsync, digests, publication, ``READY``, pruning and fault points are the same for all formats and core's, so no format
can publish half a checkpoint. A format is found by the name in the manifest, through the plugins installed.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from mtb_core.api.descriptions import load_reference
from mtb_core.api.errors import PluginError
from mtb_core.registry.discovery import discover

from .dtypes import item_bytes
from .entries import Chunk, Part, TensorEntry
from .files import safe_parts
from .layout import LATEST, MANIFEST, README, READY, STATE, shown

if TYPE_CHECKING:
    from mtb_core.registry.discovery import Registry

    from .tensors import TensorFiles

#: What is written if nobody asks for another format.
DEFAULT_FORMAT = "safetensors"

#: Names in a checkpoint that are core's.
_RESERVED = {LATEST, MANIFEST, READY, README, STATE}


@attrs.frozen
class Slot:
    """Place of one part in a file.

    Attributes:
        elements: byte of the file at which its elements begin, row by row; a multiple of the size of an element.
        entry: (start, length) of what the format stores around them, for its index; None: the elements alone.
    """

    elements: int
    entry: tuple[int, int] | None = None


@attrs.frozen
class FileLayout:
    """One file of one rank: all of its bytes except elements of tensors, and the places of those.

    Attributes:
        name: plain path in the checkpoint; no other rank's file may have it.
        size: of the file, in bytes; what is neither fixed nor an element is zero.
        fixed: bytes that are the same in every save, each with its place.
        slots: the parts in this file, by their index in what `Storage.lay_out` was given.
    """

    name: str
    size: int
    fixed: Sequence[tuple[int, bytes]]
    slots: Mapping[int, Slot]


class Storage(abc.ABC):
    """A checkpoint format. Made without arguments; one object serves any number of checkpoints and keeps no state.

    Attributes:
        dtypes: dtypes that it can hold, as torch names them; others are refused before anything is written.
        index_files: names of the files that `index` makes.
        readme: one or two lines of Markdown on its files, for a checkpoint's README.md.
    """

    dtypes: frozenset[str]
    index_files: tuple[str, ...]
    readme: str

    @abc.abstractmethod
    def file(self, rank: int) -> str:
        """Name of the first file of `rank`, which is there even if the rank has nothing to write."""

    @abc.abstractmethod
    def lay_out(self, parts: Sequence[Part], rank: int) -> Sequence[FileLayout]:
        """The files in which `rank` stores `parts`: the one named ``file(rank)``, and more if the format needs more.

        Called before the first save, and again if shapes change; not in every save. Each part has one place.

        Raises:
            ValueError: a part that cannot be stored; names its key.
        """

    @abc.abstractmethod
    def index(self, entries: Mapping[str, TensorEntry]) -> Mapping[str, bytes]:
        """Content of the `index_files`, which rank 0 writes; `entries` are the tensors of all ranks."""

    @abc.abstractmethod
    def entries(self, path: Path) -> Mapping[str, TensorEntry]:
        """The tensors of the checkpoint at `path`, by key, from its `index_files`.

        Nothing that a file says may be executed, or be believed unchecked: see `checked_entry`.

        Raises:
            DamagedCheckpoint: an index file is missing, unreadable or contradicts itself.
        """

    def reader(self, path: Path, entries: Mapping[str, TensorEntry]) -> TensorFiles:
        """A reader of `entries`; a format whose chunks are not bare elements has a subclass of its own."""
        from .tensors import TensorFiles  # noqa: PLC0415  (needs numpy)

        return TensorFiles(path, entries)


def storage_named(name: str, registry: Registry | None = None, distribution: str | None = None) -> Storage:
    """The format `name` of the plugins in `registry`; None: of those installed.

    Raises:
        PluginError: there is none, or it is disabled or failed. The text says what to install, if `distribution`, the
            distribution that had written the checkpoint, is known.
    """
    registry = discover() if registry is None else registry
    try:
        info = registry.checkpoint_format(name)
    except PluginError as error:
        raise PluginError(shown(f"{error}{_origin(name, distribution, registry)}")) from error
    made: Storage = load_reference(info.impl)()
    return made


def _origin(name: str, distribution: str | None, registry: Registry) -> str:
    """Advice for a format `name` of `distribution` that is not there; it follows the registry's own message."""
    if distribution is None:
        return ""
    for record in registry.records:
        if record.distribution == distribution and record.status != "active":
            if name in {record.name, *record.provides.get("checkpoint_formats", ())}:
                return ""
            verb = "is disabled" if record.status == "disabled" else "could not be loaded"
            return f" It comes with the {record.label}, which {verb}: {record.reason}."
    return f" It comes with {distribution}: pip install {distribution}."


def provider_of(name: str, registry: Registry | None = None) -> str | None:
    """Name of the distribution that has the format `name`, to be recorded in manifests."""
    found = (discover() if registry is None else registry).provider("checkpoint_formats", name)
    return None if found is None else found.distribution


def laid_out(storage: Storage, parts: Sequence[Part], rank: int) -> Sequence[FileLayout]:
    """The format's `Storage.lay_out`, after checking that every element has a place of its own in a fit file.

    Raises:
        ValueError: the format is wrong about that; names the file or the key.
    """
    layouts = storage.lay_out(parts, rank)
    names = [layout.name for layout in layouts]
    if len(set(names)) < len(names) or storage.file(rank) not in names:
        raise ValueError(f"the checkpoint format names the files {names}; they must differ and be {storage.file(rank)}")
    placed = sorted(index for layout in layouts for index in layout.slots)
    if placed != list(range(len(parts))):
        raise ValueError(f"the checkpoint format has places for the parts {placed}, of {len(parts)} to be stored")
    for layout in layouts:
        check_name(layout.name)
        taken = [(at, at + len(data), "its fixed bytes") for at, data in layout.fixed]
        for index, slot in layout.slots.items():
            part = parts[index]
            if slot.elements % item_bytes(part.dtype):
                raise ValueError(
                    f"the checkpoint format puts {part.key!r} at byte {slot.elements}, which is not aligned"
                )
            taken.append((slot.elements, slot.elements + part.nbytes, repr(part.key)))
        end, last = 0, "the start"
        for start, stop, what in sorted(t for t in taken if t[0] < t[1]):
            if start < end:
                raise ValueError(f"the checkpoint format puts {what} over {last} in {layout.name}")
            end, last = stop, what
        if end > layout.size or any(start < 0 for start, _, _ in taken):
            raise ValueError(f"the checkpoint format puts {last} outside of {layout.name} ({layout.size} bytes)")
    return layouts


def check_name(name: str) -> None:
    """Refuse a format's name of a file that is no plain path in a checkpoint, or one of core's.

    Raises:
        ValueError: it is such a name.
    """
    first, *rest = safe_parts(name)
    if name in _RESERVED or (rest and first in {"rng", "metrics"}):
        raise ValueError(f"the checkpoint format names the file {name}, which is core's")


def chunk_of(part: Part, layout: FileLayout, slot: Slot) -> Chunk:
    """Chunk of the index that stands for a part."""
    start, length = slot.entry or (slot.elements, part.nbytes)
    return Chunk(part.offset, part.sizes, layout.name, start, length)
