"""The bytes of a ``.distcp`` file, made once: each save only copies tensors into their places in it.

Each entry is what ``torch.save`` of the tensor writes, so ``torch.distributed.checkpoint`` reads the file. (The
CRC-32 of the elements is left zero, as torch itself does when told not to compute it; torch does not check it, and
the manifest's digest of the whole file is stronger.)
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .metadata import Chunk, TensorEntry
from .plan import Part

#: Entries start at multiples of this, so that a tensor of any dtype can be viewed in place.
_ALIGNMENT = 64


@attrs.frozen
class Image:
    """One rank's file.

    Attributes:
        buffer: the bytes of the file, uint8; pinned where tensors live on a CUDA device.
        targets: views into `buffer`, one for each part.
        chunks: the place of each part.
    """

    buffer: torch.Tensor
    targets: Sequence[torch.Tensor]
    chunks: Sequence[Chunk]

    def stage(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors of the parts, in order, into the image; returns when they may change again."""
        if not tensors:
            return
        torch._foreach_copy_(list(self.targets), list(tensors), non_blocking=True)
        for device in {t.device for t in tensors if t.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def view(self) -> memoryview:
        """The file's bytes."""
        data: memoryview = self.buffer.numpy().data
        return data


def make_image(parts: Sequence[Part], file: str, *, pinned: bool) -> Image:
    """Lay out the file named `file` for `parts` and allocate it; all its memory is touched here, not in a save."""
    templates = [_Template.of(part.dtype, part.sizes) for part in parts]
    starts, end = [], 0
    for template in templates:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + template.length
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pinned).zero_()
    targets, chunks = [], []
    for part, template, start in zip(parts, templates, starts, strict=True):
        for at, data in template.fragments:
            buffer[start + at : start + at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        where = start + template.data_start
        raw = buffer[where : where + part.nbytes]
        targets.append(raw.view(getattr(torch, part.dtype)).view(part.sizes))
        chunks.append(Chunk(part.offset, part.sizes, file, start, template.length))
    return Image(buffer, targets, chunks)


def metadata_bytes(kinds: Mapping[str, TensorEntry]) -> bytes:
    """Content of ``.metadata``; it names no path outside of the checkpoint."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored = {}
    for key, entry in kinds.items():
        boxes = [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.sizes)) for c in entry.chunks]
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        described[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)
        for index, chunk in enumerate(entry.chunks):
            stored[MetadataIndex(key, chunk.offset, index)] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    metadata = Metadata(described, None, stored, StorageMeta(), version=CURRENT_DCP_VERSION)
    return pickle.dumps(metadata, protocol=4)


@attrs.frozen
class _Template:
    """What ``torch.save`` writes around the elements of a tensor."""

    fragments: Sequence[tuple[int, bytes]]
    data_start: int
    length: int

    @classmethod
    def of(cls, dtype: str, sizes: tuple[int, ...]) -> _Template:
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
