"""An entry of a ``.distcp`` file: the small zip archive that ``torch.save`` makes of one tensor.

What is read of it is checked against the index before anything is allocated; its description is a pickle that is
never unpickled (see `inert`); the elements are read straight from their place in the file.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Sequence
from typing import Any

import attrs

from mtb_core.ckpt import CARRIERS, item_bytes

from .inert import Inert, Name, Persistent, read_pickle

#: The class names under which torch pickles storages.
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_UNTYPED = "untyped"
_NAMES: dict[tuple[str, str], Any] = {
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    **{("torch", dtype): dtype for dtype in CARRIERS},
    ("torch.storage", "UntypedStorage"): _UNTYPED,
    ("torch._utils", "_rebuild_tensor_v2"): Name("tensor"),
    ("torch._utils", "_rebuild_tensor_v3"): Name("tensor"),
    ("collections", "OrderedDict"): Name("table"),
}

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_PICKLE_BYTES = 1 << 16
#: `zipfile` reads the whole directory of an archive at once; that of a tensor has less than a thousand bytes.
_DIRECTORY_BYTES = 1 << 16


def locate(file: io.RawIOBase, dtype: str, sizes: tuple[int, ...]) -> int:
    """Offset in the archive `file` of the elements of its one contiguous tensor of `dtype` and `sizes`.

    Raises:
        ValueError: it is not the archive of exactly such a tensor.
    """
    count = math.prod(sizes)
    try:
        _check_directory(file)
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


def _check_directory(file: io.RawIOBase) -> None:
    """Refuse an archive whose directory is longer than that of any tensor, before it is read."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 22))
    end = file.read(22) or b""
    if len(end) == 22 and end[:4] == b"PK\5\6" and int.from_bytes(end[12:16], "little") <= _DIRECTORY_BYTES:
        return
    raise ValueError("it is no archive, or its directory is too long")


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


def _check_description(data: bytes, dtype: str, sizes: tuple[int, ...]) -> None:
    tensor = read_pickle(data, _NAMES)
    if not isinstance(tensor, Inert) or tensor.kind != "tensor" or len(tensor.args) < 4:
        raise ValueError("it is not a tensor")
    storage, offset, shape, strides = tensor.args[:4]
    if not isinstance(storage, Persistent) or not isinstance(storage.identity, tuple) or len(storage.identity) != 5:
        raise ValueError("it has no storage")
    kind, stored, key, _, count = storage.identity
    if kind != "storage" or key != "0" or type(count) is not int:
        raise ValueError("it names an unknown storage")
    if stored == _UNTYPED:
        stored = tensor.args[6] if len(tensor.args) > 6 else None
        count //= item_bytes(dtype)
    plain = all(isinstance(v, tuple) and all(type(i) is int for i in v) for v in (shape, strides))
    if stored != dtype or not plain or tuple(shape) != sizes or offset != 0 or count != math.prod(sizes):
        raise ValueError(f"it describes another tensor than {dtype} {sizes}")
    dense = tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))
    if math.prod(sizes) and any(n > 1 and s != d for n, s, d in zip(sizes, strides, dense, strict=True)):
        raise ValueError("it is not stored row by row")


@attrs.frozen
class Template:
    """The bytes that ``torch.save`` writes around the elements of a tensor.

    Attributes:
        fragments: the bytes before and behind them, each with its place.
        data_start: where the elements begin.
        length: of the whole.
    """

    fragments: Sequence[tuple[int, bytes]]
    data_start: int
    length: int

    @classmethod
    def of(cls, dtype: str, sizes: tuple[int, ...]) -> Template:
        """For a tensor of `dtype` and `sizes`.

        The CRC-32 of the elements is left zero, as torch itself does when told not to compute it; torch does not
        check it, and the manifest's digest of the whole file is stronger.
        """
        import torch  # noqa: PLC0415  (reading needs none of it)

        recorder = _Recorder()
        with torch.serialization.skip_data():
            torch.save(torch.empty(sizes, dtype=getattr(torch, dtype)), recorder)  # type: ignore[arg-type]
        start, _ = recorder.gap or (0, 0)
        return cls(recorder.fragments, start, recorder.at)


class _Recorder:
    """A file for ``torch.save`` that keeps what is written and where the elements were skipped."""

    def __init__(self) -> None:
        self.at = 0
        self.fragments: list[tuple[int, bytes]] = []
        self.gap: tuple[int, int] | None = None

    def write(self, data: bytes | memoryview) -> int:
        self.fragments.append((self.at, bytes(data)))
        self.at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_CUR, "torch.save of this version moves in the file in an unknown way"
        assert self.gap is None, "torch.save of this version leaves more than one gap for a tensor"
        self.gap = (self.at, offset)
        self.at += offset
        return self.at

    def tell(self) -> int:
        return self.at

    def flush(self) -> None: ...
