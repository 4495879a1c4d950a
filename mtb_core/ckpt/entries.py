"""The tensors of a checkpoint as an index describes them: boxes in global coordinates, and their places in files.

Pure and torch-free; shared by core and by checkpoint formats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from .dtypes import CARRIERS, item_bytes

#: No real tensor, and no real file, is larger; keeps the arithmetic on hostile sizes small.
MOST_BYTES = 1 << 56
#: Dimensions that a tensor has at most.
MOST_DIMENSIONS = 64
#: Boxes that no straight cut separates are compared in pairs, so there must not be many.
_MOST_PAIRED = 1000
#: How often groups of boxes are cut again. Shards, and shards of flattened tensors, need one cut a dimension.
_MOST_CUTS = 16

Box = tuple[tuple[int, ...], tuple[int, ...]]


@attrs.frozen
class Part:
    """The description of a `Piece`: key, dtype as torch names it, global shape, offset and local sizes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the part's elements."""
        return math.prod(self.sizes) * item_bytes(self.dtype)


@attrs.frozen
class Chunk:
    """A stored box of a tensor.

    Attributes:
        offset, sizes: the box, in global coordinates.
        file: name of the file, relative to the checkpoint.
        start, length: the bytes of the file that hold it: its elements row by row, or an entry of the format's own
            around them.
    """

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


def checked_entry(key: str, dtype: Any, shape: Any, chunks: Sequence[Chunk]) -> TensorEntry:
    """The entry of tensor `key` as an index states it, with all that a reader relies on checked.

    Raises:
        ValueError: names `key`; an unknown dtype, an impossible shape, or chunks that do not tile it.
    """
    if not isinstance(dtype, str) or dtype not in CARRIERS:
        raise ValueError(f"{key!r} has the unknown dtype {_short(dtype)}")
    shape = checked_extent(shape)
    if math.prod(shape) * item_bytes(dtype) > MOST_BYTES:
        raise ValueError(f"{key!r} has the impossible shape {shape}")
    check_tiling(key, shape, [(chunk.offset, chunk.sizes) for chunk in chunks])
    return TensorEntry(dtype, shape, tuple(chunks))


def checked_count(value: Any) -> int:
    """`value` from a file as a number of elements or bytes.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not int or not 0 <= value <= MOST_BYTES:
        raise ValueError(f"a size was expected, found {_short(value)}")
    return value


def checked_extent(value: Any) -> tuple[int, ...]:
    """`value` from a file as a shape or an offset.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, list | tuple) or len(value) > MOST_DIMENSIONS:
        raise ValueError("a shape was expected")
    return tuple(checked_count(item) for item in value)


def _short(value: Any) -> str:
    """For a message; what is nested may be too large to be shown."""
    return repr(value)[:60] if isinstance(value, int | float | str) else type(value).__name__


def check_tiling(key: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Check that `boxes` (offset, sizes) cover a tensor of `shape` exactly once.

    Takes n log n steps for n boxes that straight cuts separate, as all ways of sharding do.

    Raises:
        ValueError: outside of the tensor, overlapping, or a part of it in no box; names the tensor.
    """
    for offset, sizes in boxes:
        outside = len(offset) != len(shape) or len(sizes) != len(shape)
        if outside or any(o + s > whole for o, s, whole in zip(offset, sizes, shape, strict=True)):
            raise ValueError(f"{key!r} of shape {shape} has a part at {offset} of sizes {sizes}, outside of it")
    solid = [box for box in boxes if all(box[1])]
    groups: list[tuple[list[Box], int]] = [(solid, 0)]
    while groups:
        group, depth = groups.pop()
        if len(group) < 2:
            continue
        parted = _cut(group, len(shape)) if depth < _MOST_CUTS else [group]
        if len(parted) > 1:
            groups += [(part, depth + 1) for part in parted]
        else:
            _check_pairs(key, group)
    if sum(math.prod(sizes) for _, sizes in solid) != math.prod(shape):
        raise ValueError(f"{key!r} of shape {shape} is not covered: parts of it are missing")


def _cut(boxes: list[Box], dimensions: int) -> list[list[Box]]:
    """`boxes` in groups that no box of another group reaches into, along the first dimension that has several."""
    for d in range(dimensions):
        groups: list[list[Box]] = []
        end = -1
        for box in sorted(boxes, key=lambda box, d=d: box[0][d]):  # type: ignore[misc]
            if box[0][d] >= end:
                groups.append([])
            groups[-1].append(box)
            end = max(end, box[0][d] + box[1][d])
        if len(groups) > 1:
            return groups
    return [boxes]


def _check_pairs(key: str, boxes: list[Box]) -> None:
    if len(boxes) > _MOST_PAIRED:
        raise ValueError(f"{key!r} has {len(boxes)} overlapping or interlocked parts")
    for index, (offset, sizes) in enumerate(boxes):
        for other, extent in boxes[index + 1 :]:
            if all(o < p + t and p < o + s for o, s, p, t in zip(offset, sizes, other, extent, strict=True)):
                raise ValueError(f"{key!r} has overlapping parts at {offset} and {other}")
