"""Reading ``.metadata`` without running anything: an unpickler that knows a dozen names and builds inert values.

``torch.distributed.checkpoint`` stores its index as a pickle. Here no class of torch is created: every known name
stands for a small class that only holds what it was given, every other name is refused. Needs no torch.
"""

# ruff: noqa: TRY004  (a wrong type in a file is a wrong value)

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from typing import Any, Self

import attrs

from .dtypes import CARRIERS, item_bytes

#: No real tensor is larger; keeps the arithmetic on hostile sizes small.
_MOST_BYTES = 1 << 56


@attrs.frozen
class Chunk:
    """A stored box of a tensor: `offset` and `sizes` in global coordinates; bytes `start` … `start + length` of `file`."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@attrs.frozen
class TensorEntry:
    """A stored tensor: dtype as torch names it, global shape, and the chunks that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * item_bytes(self.dtype)


@attrs.frozen
class Index:
    """What ``.metadata`` says: the tensors by key, and the keys of entries that are not tensors."""

    tensors: Mapping[str, TensorEntry]
    others: tuple[str, ...]


class _Inert:
    """Holds the state it is given by the pickle; has no behaviour."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_Inert): ...


class _MetadataIndex(_Inert): ...


class _StorageMeta(_Inert): ...


class _TensorProperties(_Inert): ...


class _TensorStorage(_Inert): ...


class _ChunkStorage(_Inert): ...


class _BytesStorage(_Inert): ...


class _StorageInfo(_Inert): ...


class _Size(tuple):  # type: ignore[type-arg]
    __slots__ = ()

    def __new__(cls, values: Any = ()) -> Self:
        return super().__new__(cls, values)


def _ignored(*_: Any) -> None:
    """Stands for values that are read and dropped: paths, layouts, memory formats."""


_DCP = "torch.distributed.checkpoint."
_KNOWN: dict[tuple[str, str], Any] = {
    (_DCP + "metadata", "Metadata"): _Metadata,
    (_DCP + "metadata", "MetadataIndex"): _MetadataIndex,
    (_DCP + "metadata", "StorageMeta"): _StorageMeta,
    (_DCP + "metadata", "TensorProperties"): _TensorProperties,
    (_DCP + "metadata", "TensorStorageMetadata"): _TensorStorage,
    (_DCP + "metadata", "ChunkStorageMetadata"): _ChunkStorage,
    (_DCP + "metadata", "BytesStorageMetadata"): _BytesStorage,
    (_DCP + "filesystem", "_StorageInfo"): _StorageInfo,
    (_DCP + "metadata", "_MEM_FORMAT_ENCODING"): _ignored,
    ("torch.serialization", "_get_layout"): _ignored,
    ("torch", "Size"): _Size,
    ("pathlib", "PosixPath"): _ignored,
    ("pathlib", "WindowsPath"): _ignored,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in CARRIERS:
            return name
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise ValueError(f"it asks for {module}.{name}, which has no place there") from None


def parse_metadata(data: bytes) -> Index:
    """The index in the bytes of a ``.metadata`` file.

    Nothing in `data` is executed. Chunks are checked to lie in their tensor and to tile it without overlap.

    Raises:
        ValueError: not such a file, or a name in it that is not on the list, or sizes that cannot be.
    """
    try:
        root = _Unpickler(io.BytesIO(data)).load()
        return _index(root)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"it is no index of tensors ({type(error).__name__}: {error})") from error


def _index(root: Any) -> Index:
    fields = _state(root, _Metadata)
    storage: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for key, info in _items(fields.get("storage_data")):
        where, what = _state(key, _MetadataIndex), _state(info, _StorageInfo)
        if what.get("transform_descriptors"):
            raise ValueError("its entries are transformed (compressed, say), which is not supported")
        offset = where.get("offset")
        place = (_text(what["relative_path"]), _count(what["offset"]), _count(what["length"]))
        storage[_text(where["fqn"]), () if offset is None else _extent(offset)] = place
    tensors: dict[str, TensorEntry] = {}
    others: list[str] = []
    for name, entry in _items(fields.get("state_dict_metadata")):
        if isinstance(entry, _BytesStorage):
            others.append(_text(name))
        else:
            tensors[_text(name)] = _tensor(name, _state(entry, _TensorStorage), storage)
    return Index(tensors, tuple(others))


def _tensor(
    name: str, fields: Mapping[str, Any], storage: Mapping[tuple[str, tuple[int, ...]], tuple[str, int, int]]
) -> TensorEntry:
    properties = fields["properties"]
    if not isinstance(properties, _TensorProperties) or not isinstance(properties.state, tuple):
        raise ValueError(f"{name!r} has no tensor properties")
    dtype, shape = properties.state[0], _extent(fields["size"])
    if dtype not in CARRIERS:
        raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
    if math.prod(shape) * item_bytes(dtype) > _MOST_BYTES:
        raise ValueError(f"{name!r} has the impossible shape {shape}")
    if not isinstance(fields["chunks"], list):
        raise ValueError(f"{name!r} has no list of chunks")
    chunks = []
    for chunk in fields["chunks"]:
        box = _state(chunk, _ChunkStorage)
        offset, sizes = _extent(box["offsets"]), _extent(box["sizes"])
        if (name, offset) not in storage:
            raise ValueError(f"{name!r} has a chunk at {offset} that is stored nowhere")
        chunks.append(Chunk(offset, sizes, *storage[name, offset]))
    check_tiling(name, shape, [(c.offset, c.sizes) for c in chunks])
    return TensorEntry(dtype, shape, tuple(chunks))


def check_tiling(name: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Check that `boxes` (offset, sizes) cover a tensor of `shape` exactly once.

    Raises:
        ValueError: outside of the tensor, overlapping, or a part of it in no box; names the tensor.
    """
    for offset, sizes in boxes:
        outside = len(offset) != len(shape) or len(sizes) != len(shape)
        if outside or any(o + s > whole for o, s, whole in zip(offset, sizes, shape, strict=True)):
            raise ValueError(f"{name!r} of shape {shape} has a part at {offset} of sizes {sizes}, outside of it")
    solid = sorted(box for box in boxes if all(box[1]))
    for index, (offset, sizes) in enumerate(solid):
        for other, extent in solid[index + 1 :]:
            if shape and other[0] >= offset[0] + sizes[0]:
                break  # sorted by offset: all further ones start below this box
            if all(o < p + t and p < o + s for o, s, p, t in zip(offset, sizes, other, extent, strict=True)):
                raise ValueError(f"{name!r} has overlapping parts at {offset} and {other}")
    if sum(math.prod(sizes) for _, sizes in solid) != math.prod(shape):
        raise ValueError(f"{name!r} of shape {shape} is not covered: parts of it are missing")


def _state(value: Any, kind: type[_Inert]) -> Mapping[str, Any]:
    """The fields of an inert value of the right kind, as a plain dict with text keys."""
    if not isinstance(value, kind):
        raise ValueError(f"a {kind.__name__.strip('_')} was expected, found {type(value).__name__.strip('_')}")
    state = {} if value.state is None else value.state
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"the state of a {kind.__name__.strip('_')} is not a table")
    return state


def _items(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise ValueError("a table was expected")
    return list(value.items())


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a text was expected, found {type(value).__name__}")
    value.encode()  # refuses halves of surrogate pairs
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_BYTES:
        raise ValueError(f"a size was expected, found {str(value)[:60]}")
    return value


def _extent(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > 64:
        raise ValueError("a shape was expected")
    return tuple(_count(item) for item in value)
