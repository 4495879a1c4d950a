"""The checkpoint format ``dcp``: ``__R_0.distcp`` of each rank R, and ``.metadata``."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtb_core.ckpt import (
    CARRIERS,
    Chunk,
    DamagedCheckpoint,
    FileLayout,
    Part,
    Slot,
    Storage,
    TensorEntry,
    TensorFiles,
    read_small,
    reading,
)

from .archives import Template, locate
from .index import metadata_bytes, parse_metadata

METADATA = ".metadata"
#: Largest ``.metadata`` that is read.
_METADATA_BYTES = 1 << 28
#: Entries start at multiples of this, so that a tensor of any dtype can be viewed in place.
_ALIGNMENT = 64
#: Param groups of format 1 and 2, as bytes of pickles. They are never read.
_GROUPS = "optimizer.param_groups"


class DcpStorage(Storage):
    """See the module."""

    dtypes = frozenset(CARRIERS)
    index_files = (METADATA,)
    readme = (
        "`.metadata` and `__*.distcp` hold the tensors of model and optimizer in the format of\n"
        "  `torch.distributed.checkpoint`; nothing in them needs unpickling of code."
    )

    def file(self, rank: int) -> str:
        """As ``dcp.save`` names it."""
        return f"__{rank}_0.distcp"

    def lay_out(self, parts: Sequence[Part], rank: int) -> Sequence[FileLayout]:
        """One file, with an entry for each part as ``torch.save`` writes it."""
        fixed: list[tuple[int, bytes]] = []
        slots: dict[int, Slot] = {}
        end = 0
        for index, part in enumerate(parts):
            template = Template.of(part.dtype, part.sizes)
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            fixed += [(start + at, data) for at, data in template.fragments]
            slots[index] = Slot(start + template.data_start, (start, template.length))
            end = start + template.length
        return [FileLayout(self.file(rank), end, fixed, slots)]

    def index(self, entries: Mapping[str, TensorEntry]) -> Mapping[str, bytes]:
        """``.metadata``."""
        return {METADATA: metadata_bytes(entries)}

    def entries(self, path: Path) -> Mapping[str, TensorEntry]:
        """From ``.metadata``; entries that are not tensors are refused, but for param groups of formats 1 and 2."""
        with reading(path, METADATA):
            index = parse_metadata(read_small(path, METADATA, _METADATA_BYTES))
        others = [key for key in index.others if not key.startswith(_GROUPS)]
        if others:
            raise DamagedCheckpoint(path, METADATA, f"it has entries that are not tensors: {', '.join(others[:3])}")
        return index.tensors

    def reader(self, path: Path, entries: Mapping[str, TensorEntry]) -> TensorFiles:
        """Each chunk is an archive."""
        return _Archives(path, entries)


class _Archives(TensorFiles):
    def locate(self, dtype: str, chunk: Chunk) -> int:
        """In the archive."""
        part = _Slice(self.descriptor(chunk.file), chunk.start, chunk.length)
        return chunk.start + locate(part, dtype, chunk.sizes)


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
