"""Reading tensors of a checkpoint, whole or in parts, in global coordinates and without torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from . import files
from .dtypes import carrier, item_bytes
from .entries import Chunk, TensorEntry
from .layout import DamagedCheckpoint


class TensorFiles:
    """The tensors of one checkpoint; a context manager that closes the files it opened.

    The elements of a chunk are all of its bytes. A format with an entry of its own around them overrides `locate`.

    Args:
        path: the step folder.
        entries: what the index says of each tensor.
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
            DamagedCheckpoint: the file does not hold what the index says.
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
        """Find every tensor in its file, and check what else the files say of them, without reading elements.

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
        descriptor, done = self.descriptor(file), 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise DamagedCheckpoint(self.path, file, error.strerror or str(error)) from error
            if not count:
                raise DamagedCheckpoint(self.path, file, f"it ends at byte {offset + done}, inside of a tensor")
            done += count

    def descriptor(self, file: str) -> int:
        """`file` of the checkpoint, open for reading; closed with this reader."""
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
            if chunk.start + chunk.length > os.fstat(self.descriptor(chunk.file)).st_size:
                raise DamagedCheckpoint(self.path, chunk.file, f"it is too short to hold {key!r}")
            try:
                found = self.locate(dtype, chunk)
            except ValueError as error:
                raise DamagedCheckpoint(self.path, chunk.file, f"the entry of {key!r}: {error}") from error
            self._places[chunk.file, chunk.start] = found
        return found

    def locate(self, dtype: str, chunk: Chunk) -> int:
        """Byte of the file at which the elements of `chunk` start; its bytes are known to be there.

        Raises:
            ValueError: they are not an entry of such a tensor.
        """
        if chunk.length != math.prod(chunk.sizes) * item_bytes(dtype):
            raise ValueError(f"it has {chunk.length} bytes, which are not {dtype} of {list(chunk.sizes)}")
        return chunk.start


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
