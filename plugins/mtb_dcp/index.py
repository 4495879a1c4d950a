"""``.metadata``, the index of ``torch.distributed.checkpoint``: read without running anything, and written for it."""

# ruff: noqa: TRY004  (a wrong type in a file is a wrong value)

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import attrs

from mtb_core.ckpt import CARRIERS, Chunk, TensorEntry, checked_count, checked_entry, checked_extent

from .inert import Inert, Name, read_pickle


@attrs.frozen
class Index:
    """Contents of ``.metadata``: the tensors by key, and the keys of entries that are not tensors."""

    tensors: Mapping[str, TensorEntry]
    others: tuple[str, ...]


_DCP = "torch.distributed.checkpoint."
#: Of some only the name is known; what they hold is read and dropped: paths, layouts, memory formats.
_NAMES: dict[tuple[str, str], Any] = {
    **{("torch", dtype): dtype for dtype in CARRIERS},
    **{
        (_DCP + "metadata", kind): Name(kind)
        for kind in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "BytesStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (_DCP + "filesystem", "_StorageInfo"): Name("_StorageInfo"),
    ("torch.serialization", "_get_layout"): Name("layout"),
    ("torch", "Size"): Name("Size"),
    ("pathlib", "PosixPath"): Name("path"),
    ("pathlib", "WindowsPath"): Name("path"),
}


def parse_metadata(data: bytes) -> Index:
    """The index in the bytes of a ``.metadata`` file.

    Nothing in `data` is executed. Chunks are checked to lie in their tensor and to tile it without overlap.

    Raises:
        ValueError: not such a file, or a name in it that is not on the list, or sizes that cannot be.
    """
    fields = _state(read_pickle(data, _NAMES), "Metadata")
    storage: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for key, info in _items(fields.get("storage_data")):
        where, what = _state(key, "MetadataIndex"), _state(info, "_StorageInfo")
        if what.get("transform_descriptors"):
            raise ValueError("its entries are transformed (compressed, say), which is not supported")
        offset = where.get("offset")
        place = (_text(what.get("relative_path")), checked_count(what.get("offset")), checked_count(what.get("length")))
        storage[_text(where.get("fqn")), () if offset is None else _size(offset)] = place
    tensors: dict[str, TensorEntry] = {}
    others: list[str] = []
    for name, entry in _items(fields.get("state_dict_metadata")):
        if isinstance(entry, Inert) and entry.kind == "BytesStorageMetadata":
            others.append(_text(name))
        else:
            tensors[_text(name)] = _tensor(name, _state(entry, "TensorStorageMetadata"), storage)
    return Index(tensors, tuple(others))


def _tensor(
    name: str, fields: Mapping[str, Any], storage: Mapping[tuple[str, tuple[int, ...]], tuple[str, int, int]]
) -> TensorEntry:
    properties, boxes = fields.get("properties"), fields.get("chunks")
    if not isinstance(properties, Inert) or not isinstance(properties.state, tuple) or not properties.state:
        raise ValueError(f"{name!r} has no tensor properties")
    if not isinstance(boxes, list):
        raise ValueError(f"{name!r} has no list of chunks")
    chunks = []
    for chunk in boxes:
        box = _state(chunk, "ChunkStorageMetadata")
        offset, sizes = _size(box.get("offsets")), _size(box.get("sizes"))
        if (name, offset) not in storage:
            raise ValueError(f"{name!r} has a chunk at {offset} that is stored nowhere")
        chunks.append(Chunk(offset, sizes, *storage[name, offset]))
    return checked_entry(name, properties.state[0], _size(fields.get("size")), chunks)


def _state(value: Any, kind: str) -> Mapping[str, Any]:
    """The fields of an object of this kind, as a table with text keys."""
    if not isinstance(value, Inert) or value.kind != kind:
        found = value.kind if isinstance(value, Inert) else type(value).__name__
        raise ValueError(f"a {kind} was expected, found {found}")
    state = {} if value.state is None else value.state
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"the state of a {kind} is not a table")
    return state


def _items(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise ValueError("a table was expected")
    return list(value.items())


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a text was expected, found {type(value).__name__}")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """A ``torch.Size``, or a tuple in its place."""
    if isinstance(value, Inert) and value.kind == "Size" and len(value.args) == 1:
        value = value.args[0]
    return checked_extent(value)


def metadata_bytes(entries: Mapping[str, TensorEntry]) -> bytes:
    """Content of ``.metadata``; it names no path outside of the checkpoint."""
    import torch  # noqa: PLC0415  (reading needs none of it)
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo  # noqa: PLC0415
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored = {}
    for key, entry in entries.items():
        boxes = [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.sizes)) for c in entry.chunks]
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        described[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)
        for index, chunk in enumerate(entry.chunks):
            stored[MetadataIndex(key, chunk.offset, index)] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    metadata = Metadata(described, None, stored, StorageMeta(), version=CURRENT_DCP_VERSION)
    return pickle.dumps(metadata, protocol=4)
