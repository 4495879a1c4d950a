"""Flat fragments of tensors in global coordinates, for strategies that cut a model into contiguous ranges of elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .values import Piece

if TYPE_CHECKING:
    import torch


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the elements ``[start, stop)`` of a row-major tensor of `shape` into rectangles, in order of their elements.

    Each is (offset, sizes), one entry a dimension, and holds a contiguous range of elements. A tensor of n dimensions
    needs at most ``2 (n - 1) + 1``: partial rows before and after the whole ones, at each level. An empty range has
    none.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    rest = tuple(shape[1:])
    row = math.prod(rest)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:  # all within one row
        yield from _in_row(first, boxes(rest, head, tail))
        return
    if head:
        yield from _in_row(first, boxes(rest, head, row))
        first += 1
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    if tail:
        yield from _in_row(last, boxes(rest, 0, tail))


def _in_row(
    index: int, found: Iterator[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, sizes in found:
        yield (index, *offset), (1, *sizes)


def fragment_pieces(flat: torch.Tensor, shape: tuple[int, ...], start: int) -> list[Piece]:
    """Pieces of a tensor of which this rank holds a contiguous range of elements.

    `flat` is one-dimensional and holds the elements ``[start, start + flat.numel())`` of the row-major tensor of
    `shape`, without padding. The pieces are live, detached views of it: filling them in place fills `flat`. An empty
    fragment has no pieces.

    Raises:
        ValueError: `flat` is not one-dimensional, or reaches beyond the tensor.
    """
    stop = start + flat.numel()
    if flat.dim() != 1 or start < 0 or stop > math.prod(shape):
        raise ValueError(
            f"A fragment of a tensor of shape {list(shape)} ({math.prod(shape)} elements) must be one-dimensional and "
            f"lie within it; got one of shape {list(flat.shape)} that starts at {start}. Trim padding first."
        )
    out, position, data = [], 0, flat.detach()
    for offset, sizes in boxes(shape, start, stop):
        count = math.prod(sizes)
        out.append(Piece(data.narrow(0, position, count).view(sizes), tuple(shape), offset))
        position += count
    return out
