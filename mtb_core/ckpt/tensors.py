"""Reading tensors of a checkpoint, whole or in parts, in global coordinates and without torch.

An entry of a ``.distcp`` file is a small zip archive as ``torch.save`` writes it. What is read of it is checked
against ``.metadata`` before anything is allocated, its pickle goes through an unpickler that knows two names, and the
elements are read straight from their place in the file.
"""

# ruff: noqa: TRY004  (a wrong type in a file is a wrong value)

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from . import files
from .dtypes import CARRIERS, STORAGES, carrier, item_bytes
from .layout import DamagedCheckpoint
from .metadata import Chunk, TensorEntry

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_PICKLE_BYTES = 1 << 16


class TensorFiles:
    """The tensors of one checkpoint; a context manager that closes the files it opened.

    Args:
        path: the step folder.
        entries: what ``.metadata`` says of each tensor.
    """

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.path = path
        self.entries = entries
        self._open: dict[str, int] = {}
        self._places: dict[tuple[str, int], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, key: str, offset: tuple[int, ...], sizes: tuple[int, ...], out: np.ndarray) -> None:
        """Fill `out` (of `sizes`, in the carrier dtype) with the box of tensor `key` at `offset`.

        Raises:
            DamagedCheckpoint: the file does not hold what ``.metadata`` says.
        """
        entry = self.entries[key]
        for chunk in entry.chunks:
            low = tuple(max(a, b) for a, b in zip(offset, chunk.offset, strict=True))
            high = tuple(min(a + s, b + t) for a, s, b, t in zip(offset, sizes, chunk.offset, chunk.sizes, strict=True))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            box: tuple[Any, ...] = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
            target = out[(..., *box)]  # the ellipsis keeps a view also where there are no dimensions
            inside = tuple(a - o for a, o in zip(low, chunk.offset, strict=True))
            self._read_chunk(key, entry.dtype, chunk, inside, target)

    def blocks(self, key: str, most_bytes: int = 16 << 20) -> Iterator[tuple[int, np.ndarray]]:
        """The tensor as consecutive flat blocks in row-major order: (index of the first element, elements)."""
        entry = self.entries[key]
        limit = max(1, most_bytes // item_bytes(entry.dtype))
        first = 0
        for offset, sizes in row_major_boxes(entry.shape, limit):
            out = np.empty(sizes, carrier(entry.dtype))
            self.read(key, offset, sizes, out)
            yield first, out.reshape(-1)
            first += out.size

    def check_all(self) -> None:
        """Find every entry in its file, without reading elements.

        Raises:
            DamagedCheckpoint: the first that is not where it should be.
        """
        for key, entry in self.entries.items():
            for chunk in entry.chunks:
                self._place(key, entry.dtype, chunk)

    def _read_chunk(self, key: str, dtype: str, chunk: Chunk, inside: tuple[int, ...], target: np.ndarray) -> None:
        """Copy the box of `target`'s shape at `inside` the chunk, reading the shortest run of bytes that has it all."""
        place, size = self._place(key, dtype, chunk), item_bytes(dtype)
        strides = [math.prod(chunk.sizes[d + 1 :]) for d in range(len(chunk.sizes))]
        first = sum(i * s for i, s in zip(inside, strides, strict=True))
        count = sum((n - 1) * s for n, s in zip(target.shape, strides, strict=True)) + 1
        if target.flags.c_contiguous and count == target.size:
            self._fill(chunk.file, place + first * size, target.reshape(-1).view(np.uint8).data)
            return
        run = np.empty(count, carrier(dtype))
        self._fill(chunk.file, place + first * size, run.view(np.uint8).data)
        byte_strides = [s * size for s in strides]
        target[...] = np.lib.stride_tricks.as_strided(run, target.shape, byte_strides, writeable=False)

    def _fill(self, file: str, offset: int, view: memoryview) -> None:
        descriptor, done = self._descriptor(file), 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise DamagedCheckpoint(self.path, file, error.strerror or str(error)) from error
            if not count:
                raise DamagedCheckpoint(self.path, file, f"it ends at byte {offset + done}, inside of a tensor")
            done += count

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            try:
                self._open[file] = files.open_inside(self.path, file)
            except OSError as error:
                raise DamagedCheckpoint(self.path, file, error.strerror or str(error)) from error
            except ValueError as error:
                raise DamagedCheckpoint(self.path, file, str(error)) from error
        return self._open[file]

    def _place(self, key: str, dtype: str, chunk: Chunk) -> int:
        """Byte of the file at which the elements of `chunk` start."""
        found = self._places.get((chunk.file, chunk.start))
        if found is None:
            descriptor = self._descriptor(chunk.file)
            if chunk.start + chunk.length > os.fstat(descriptor).st_size:
                raise DamagedCheckpoint(self.path, chunk.file, f"it is too short to hold {key!r}")
            try:
                found = chunk.start + locate(_Slice(descriptor, chunk.start, chunk.length), dtype, chunk.sizes)
            except ValueError as error:
                raise DamagedCheckpoint(self.path, chunk.file, f"the entry of {key!r}: {error}") from error
            self._places[chunk.file, chunk.start] = found
        return found


def row_major_boxes(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a tensor into boxes (offset, sizes) of at most `limit` elements that follow each other in row-major order."""
    if not math.prod(shape):
        return
    axis = 0
    while axis < len(shape) and math.prod(shape[axis + 1 :]) > limit:
        axis += 1
    if axis == len(shape):
        yield (), ()
        return
    step = max(1, limit // math.prod(shape[axis + 1 :]))
    rest = len(shape) - axis - 1
    for prefix in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            offset = (*prefix, start, *(0,) * rest)
            yield offset, (*(1,) * axis, min(step, shape[axis] - start), *shape[axis + 1 :])


def locate(file: io.RawIOBase, dtype: str, sizes: tuple[int, ...]) -> int:
    """Where in the archive `file` the elements of the one contiguous tensor of `dtype` and `sizes` start.

    Raises:
        ValueError: it is not the archive of exactly such a tensor.
    """
    count = math.prod(sizes)
    try:
        with zipfile.ZipFile(file) as archive:
            members = {name.partition("/")[2]: info for info in archive.infolist() if (name := info.filename)}
            info, description = members.get("data/0"), members.get("data.pkl")
            order = members.get("byteorder")
            if info is None or description is None:
                raise ValueError("it holds no tensor")
            for member in (info, description, *([order] if order else ())):
                if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
                    raise ValueError("it is compressed")
            if info.file_size != count * item_bytes(dtype):
                raise ValueError(f"it has {info.file_size} bytes; {count * item_bytes(dtype)} are expected")
            if order is not None and (order.file_size > 16 or _bytes_of(file, order) != b"little"):
                raise ValueError("its byte order is not little-endian")
            if description.file_size > _PICKLE_BYTES:
                raise ValueError("its description is too long")
            _check_description(_bytes_of(file, description), dtype, sizes)
            start = _data_start(file, info)
            size = file.seek(0, os.SEEK_END)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"it cannot be read ({type(error).__name__}: {error})") from error
    if start + info.file_size > size:
        raise ValueError("its elements reach beyond its end")
    return start


def _data_start(file: io.RawIOBase, info: zipfile.ZipInfo) -> int:
    file.seek(info.header_offset)
    header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if header[0] != b"PK\3\4":
        raise ValueError("its directory points to nothing")
    return info.header_offset + _LOCAL_HEADER.size + int(header[9]) + int(header[10])


def _bytes_of(file: io.RawIOBase, info: zipfile.ZipInfo) -> bytes:
    """Content of a stored member; its CRC is not looked at, the manifest's digests are stronger."""
    file.seek(_data_start(file, info))
    return file.read(info.file_size) or b""


class _Storage:
    """A storage as the pickle names it."""

    def __init__(self, dtype: str | None, count: int) -> None:
        self.dtype, self.count = dtype, count


class _Tensor:
    """A tensor as the pickle describes it: the arguments of torch's ``_rebuild_tensor_v2`` or ``_v3``."""

    def __init__(self, *args: Any) -> None:
        self.args = args


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in {"_rebuild_tensor_v2", "_rebuild_tensor_v3"}:
            return _Tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and (name in STORAGES or name == "storage"):
            return STORAGES.get(name)
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return "untyped"
        if module == "torch" and name in CARRIERS:
            return name
        raise ValueError(f"it asks for {module}.{name}, which has no place in a tensor")

    def persistent_load(self, identity: Any) -> _Storage:
        kind, storage, key, _, count = identity
        if kind != "storage" or key != "0" or type(count) is not int:
            raise ValueError("it names an unknown storage")
        return _Storage(storage, count)


def _check_description(data: bytes, dtype: str, sizes: tuple[int, ...]) -> None:
    tensor = _TensorUnpickler(io.BytesIO(data)).load()
    if not isinstance(tensor, _Tensor) or len(tensor.args) < 4:
        raise ValueError("it is not a tensor")
    storage, offset, shape, strides = tensor.args[:4]
    if not isinstance(storage, _Storage):
        raise ValueError("it has no storage")
    if storage.dtype == "untyped":
        stored = tensor.args[6] if len(tensor.args) > 6 else None
        count = storage.count // item_bytes(dtype)
    else:
        stored, count = storage.dtype, storage.count
    dense = tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))
    moves = [(s, d) for n, s, d in zip(sizes, strides, dense, strict=True) if n > 1]
    if stored != dtype or tuple(shape) != sizes or offset != 0 or count != math.prod(sizes):
        raise ValueError(f"it describes a tensor of {stored} {tuple(shape)}; {dtype} {sizes} is expected")
    if math.prod(sizes) and any(s != d for s, d in moves):
        raise ValueError("it is not stored row by row")


class _Slice(io.RawIOBase):
    """Bytes `start` … `start + length` of an open file, as a seekable file."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._start, self._length, self._at = descriptor, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = os.pread(self._descriptor, left if size < 0 else min(size, left), self._start + self._at)
        self._at += len(data)
        return data
