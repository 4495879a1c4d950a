"""The default checkpoint format: safetensors files and a JSON index. No pickle is written or read.

The first file of rank R is ``rank_RRRRR.safetensors``. Where a rank has several parts of one tensor, the second ones
are in ``rank_RRRRR.1.safetensors`` and so on, because a safetensors file holds a name once. ``index.json`` says where
each part lies, so that no other file must be opened to find a tensor. The headers say the same once more, in the form
in which torch's ``HuggingFaceStorageReader`` finds parts of tensors (``DCP_SHARDING_INFO``).

A safetensors file: eight bytes little-endian length of a JSON header, the header (name to dtype, shape, data_offsets),
then the elements row by row without gaps. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from . import files
from .dtypes import SAFETENSORS, item_bytes
from .entries import Chunk, Part, TensorEntry, checked_count, checked_entry, checked_extent
from .layout import DamagedCheckpoint, parse_json
from .manifest import reading
from .storage import FileLayout, Slot, Storage
from .tensors import TensorFiles

INDEX = "index.json"
#: Version of ``index.json``.
_VERSION = 1
#: Largest index that is read. A part takes about 60 bytes of it.
INDEX_BYTES = 1 << 27
#: Bytes of text for each list or table in an index or a header, at least. Both take up to a hundred bytes of memory.
_BYTES_A_LIST = 4
#: Largest header that the safetensors library reads.
HEADER_BYTES = 100_000_000
#: The name in a header that is not a tensor's.
METADATA = "__metadata__"
#: Elements start at a multiple of this, so that a tensor of any dtype can be viewed in place.
ALIGNMENT = 64

_FILE = re.compile(r"rank_\d{5,9}(\.[1-9]\d{0,8})?\.safetensors")
_DTYPES = {short: name for name, short in SAFETENSORS.items()}


def header_bytes(tensors: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file up to its first element, padded so that elements are aligned."""
    text = json.dumps({METADATA: metadata, **tensors}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class SafetensorsStorage(Storage):
    """See the module."""

    dtypes = frozenset(SAFETENSORS)
    index_files = (INDEX,)
    readme = (
        f"`{INDEX}` and `rank_*.safetensors` hold the tensors of model and optimizer; the latter are read by the\n"
        "  safetensors library and by torch's `HuggingFaceStorageReader`. Nothing in them is code."
    )

    def file(self, rank: int) -> str:
        """``rank_RRRRR.safetensors``."""
        return f"rank_{rank:05d}.safetensors"

    def lay_out(self, parts: Sequence[Part], rank: int) -> Sequence[FileLayout]:
        """One file, and one more for each further part of a tensor that has several here."""
        by_ordinal: list[list[int]] = [[]]
        seen: dict[str, int] = {}
        for index, part in enumerate(parts):
            if part.key == METADATA:
                raise ValueError(f"{METADATA!r} is not a possible key of a tensor in a safetensors file")
            ordinal = seen[part.key] = seen.get(part.key, -1) + 1
            if ordinal == len(by_ordinal):
                by_ordinal.append([])
            by_ordinal[ordinal].append(index)
        first = self.file(rank)
        names = [first, *(first.replace(".", f".{n}.", 1) for n in range(1, len(by_ordinal)))]
        return [_lay_out(name, parts, indices) for name, indices in zip(names, by_ordinal, strict=True)]

    def index(self, entries: Mapping[str, TensorEntry]) -> Mapping[str, bytes]:
        """``index.json``: files by number, and for each tensor dtype, shape and parts [file, byte, offset, sizes]."""
        numbers = {c.file: 0 for e in entries.values() for c in e.chunks}
        numbers = {name: number for number, name in enumerate(sorted(numbers))}
        table = {
            key: {
                "dtype": SAFETENSORS[entry.dtype],
                "shape": entry.shape,
                "parts": [[numbers[c.file], c.start, c.offset, c.sizes] for c in entry.chunks],
            }
            for key, entry in entries.items()
        }
        text = {"index_version": _VERSION, "files": list(numbers), "tensors": table}
        return {INDEX: json.dumps(text, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"}

    def entries(self, path: Path) -> Mapping[str, TensorEntry]:
        """From ``index.json``."""
        with reading(path, INDEX):
            return _parse(files.read_small(path, INDEX, INDEX_BYTES))

    def reader(self, path: Path, entries: Mapping[str, TensorEntry]) -> TensorFiles:
        """Elements lie where the index says; `check_all` compares that with the headers."""
        return _Files(path, entries)


def _lay_out(name: str, parts: Sequence[Part], indices: Sequence[int]) -> FileLayout:
    order = sorted(indices, key=lambda index: -alignment_of(parts[index].nbytes))
    described: dict[str, dict[str, Any]] = {}
    places: dict[int, int] = {}
    end = 0
    for index in order:
        part = parts[index]
        places[index], end = end, end + part.nbytes
        offsets = [places[index], end]
        described[part.key] = {"dtype": SAFETENSORS[part.dtype], "shape": part.sizes, "data_offsets": offsets}
    saved = {parts[index].key: {"saved_offsets": parts[index].offset} for index in order}
    sharding = json.dumps(saved, separators=(",", ":"), ensure_ascii=False)
    header = header_bytes(described, {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": sharding})
    if len(header) > HEADER_BYTES:
        raise ValueError(f"the header of {name} has {len(header)} bytes; the safetensors library reads {HEADER_BYTES}")
    slots = {index: Slot(len(header) + place) for index, place in places.items()}
    return FileLayout(name, len(header) + end, [(0, header)], slots)


def alignment_of(nbytes: int) -> int:
    """Alignment that a tensor of `nbytes` leaves to the one that follows it without a gap.

    In descending order of it every tensor is aligned for its dtype, and all are aligned for fast copies except those
    of odd sizes, which come last.
    """
    return math.gcd(nbytes, ALIGNMENT)


def _parse(text: bytes) -> dict[str, TensorEntry]:
    index = _parse_json(text)
    if not isinstance(index, dict) or index.get("index_version") != _VERSION:
        raise ValueError(f"it is not an index of tensors of version {_VERSION}")
    names, tensors = index.get("files"), index.get("tensors")
    if not isinstance(names, list) or not isinstance(tensors, dict) or len({*map(str, names)}) < len(names):
        raise ValueError("it has no list of different files, or no table of tensors")
    for name in names:
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise ValueError(f"it names {str(name)[:60]!r}, which is not the name of a file of tensors")
    entries = {key: _entry(key, value, names) for key, value in tensors.items()}
    _check_apart(entries)
    return entries


def _entry(key: str, value: Any, names: Sequence[str]) -> TensorEntry:
    try:
        dtype, chunks = _DTYPES[value["dtype"]], []
        for number, start, offset, extent in value["parts"]:
            sizes = checked_extent(extent)
            length = checked_count(_volume(sizes) * item_bytes(dtype))
            name = names[checked_count(number)]
            chunks.append(Chunk(checked_extent(offset), sizes, name, checked_count(start), length))
        shape = value["shape"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{key!r} is described wrongly ({type(error).__name__}: {error})") from None
    return checked_entry(key, dtype, shape, chunks)


def _volume(sizes: Sequence[int]) -> int:
    """Their product, without large numbers on the way: the first factor that is too much is returned as it is."""
    out = 1
    for size in sorted(sizes):
        out *= size
        if out > 1 << 60:
            break
    return out


def _check_apart(entries: Mapping[str, TensorEntry]) -> None:
    """No two parts share bytes."""
    places = sorted(
        (chunk.file, chunk.start, chunk.start + chunk.length, key)
        for key, entry in entries.items()
        for chunk in entry.chunks
        if chunk.length
    )
    for (file, _, end, key), (other, start, _, next_key) in itertools.pairwise(places):
        if file == other and start < end:
            raise ValueError(f"{key!r} and {next_key!r} overlap in {file}")


def _parse_json(text: bytes) -> Any:
    """`parse_json`, for texts that are too long to be parsed whatever they hold."""
    if (text.count(b"[") + text.count(b"{")) * _BYTES_A_LIST > len(text):
        raise ValueError("it has more lists and tables than a description of tensors")
    return parse_json(text)


@attrs.frozen
class _Described:
    """A part as header or index describes it; `start` is a byte of the file."""

    dtype: str
    sizes: tuple[int, ...]
    offset: tuple[int, ...]
    start: int


class _Files(TensorFiles):
    def check_all(self) -> None:
        """Also that every header is well-formed and says of the tensors in its file what the index says."""
        super().check_all()
        expected: dict[str, dict[str, _Described]] = {p.name: {} for p in self.path.glob("rank_*.safetensors")}
        for key, entry in self.entries.items():
            for chunk in entry.chunks:
                described = _Described(SAFETENSORS[entry.dtype], chunk.sizes, chunk.offset, chunk.start)
                if expected.setdefault(chunk.file, {}).setdefault(key, described) is not described:
                    raise DamagedCheckpoint(self.path, INDEX, f"it has two parts of {key!r} in {chunk.file}")
        for name, parts in expected.items():
            with reading(self.path, name):
                found = _read_header(self.descriptor(name))
                for key in sorted(found.keys() | parts.keys()):
                    if found.get(key) != parts.get(key):
                        raise ValueError(f"its header says of {key!r} something else than {INDEX}")


def _read_header(descriptor: int) -> dict[str, _Described]:
    """The parts in an open safetensors file.

    Raises:
        ValueError: its header is not one of such a file, or not one of a part of a checkpoint.
    """
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(size - 8, HEADER_BYTES):
        raise ValueError(f"it has {size} bytes, and its header should have {length}")
    header = _parse_json(os.pread(descriptor, length, 8))
    try:
        saved = parse_json(header.pop(METADATA)["DCP_SHARDING_INFO"].encode())
        found, end = {}, 0
        for key, value in sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
            start, stop = checked_extent(value["data_offsets"])
            sizes = checked_extent(value["shape"])
            if start != end or stop - start != _volume(sizes) * item_bytes(_DTYPES[value["dtype"]]):
                raise ValueError(f"the place of {key!r} is wrong: bytes {start} to {stop}")
            offset = checked_extent(saved[key]["saved_offsets"])
            found[key], end = _Described(value["dtype"], sizes, offset, 8 + length + start), stop
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is not one of tensors ({type(error).__name__}: {error})") from None
    if 8 + length + end != size:
        raise ValueError(f"it has {size} bytes, but its tensors end at {8 + length + end}")
    return found
