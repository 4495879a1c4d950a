"""Tests of mtb_core.ckpt.entries: tilings, and what an index may say."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtb_core.api.flat import fragment_pieces
from mtb_core.ckpt import entries
from mtb_core.ckpt.entries import Chunk, check_tiling, checked_count, checked_entry, checked_extent


def test_tiling():
    """Boxes must cover a tensor exactly once; empty ones do not matter."""
    check_tiling("t", (4, 4), [((0, 0), (4, 2)), ((0, 2), (2, 2)), ((2, 2), (2, 2)), ((4, 0), (0, 4))])
    check_tiling("t", (), [((), ())])
    check_tiling("t", (0, 3), [((0, 0), (0, 3))])
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    check_tiling("t", (3, 3), pinwheel)
    with pytest.raises(ValueError, match="overlapping"):
        check_tiling("t", (4, 4), [((0, 0), (4, 3)), ((0, 2), (4, 2))])
    with pytest.raises(ValueError, match="overlapping"):
        check_tiling("t", (), [((), ()), ((), ())])
    with pytest.raises(ValueError, match="overlapping"):
        check_tiling("t", (12, 2), [((0, 0), (10, 1)), ((1, 1), (1, 1)), ((2, 0), (1, 1))])
    with pytest.raises(ValueError, match="not covered"):
        check_tiling("t", (4, 4), [((0, 0), (4, 3))])
    with pytest.raises(ValueError, match="outside"):
        check_tiling("t", (4,), [((2,), (3,))])


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_tiling(data):
    """A grid that is cut anywhere is a tiling; with one box moved, resized, twice or missing it is none."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    spans = [list(itertools.pairwise(c)) for c in cuts]
    boxes = [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*spans)]
    check_tiling("t", shape, data.draw(st.permutations(boxes)))
    which, d = data.draw(st.integers(0, len(boxes) - 1)), data.draw(st.integers(0, len(shape) - 1))
    offset, sizes = boxes[which]
    change = data.draw(st.sampled_from(["grow", "twice", "missing", "move"]))
    if change == "grow":
        boxes[which] = offset, tuple(s + (i == d) for i, s in enumerate(sizes))
    elif change == "twice":
        boxes.append(boxes[which])
    elif change == "missing":
        del boxes[which]
    else:
        boxes[which] = tuple(o + (i == d) for i, o in enumerate(offset)), sizes
    with pytest.raises(ValueError, match=r"\'t\'"):
        check_tiling("t", shape, boxes)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_boxes(data):
    """Whatever boxes are given: they pass where every element is in exactly one of them, and nowhere else."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes, seen = [], np.zeros(shape, int)
    for _ in range(data.draw(st.integers(1, 6))):
        offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        sizes = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
        boxes.append((offset, sizes))
        seen[tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))] += 1
    holes = zip(*np.nonzero(seen == 0), strict=True)
    boxes += [(tuple(map(int, place)), (1,) * len(shape)) for place in holes]
    if (seen <= 1).all():
        check_tiling("t", shape, boxes)
        return
    with pytest.raises(ValueError, match="overlapping"):
        check_tiling("t", shape, boxes)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_flat_shards_tile(data):
    """Shards of a flattened tensor, cut anywhere, are a tiling."""
    import torch

    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    count = torch.Size(shape).numel()
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=5))})
    pieces = [p for a, b in itertools.pairwise(cuts) for p in fragment_pieces(torch.zeros(b - a), shape, a)]
    check_tiling("t", shape, [(tuple(p.offset), tuple(p.tensor.shape)) for p in pieces])


@pytest.mark.parametrize("kind", ["columns", "grid", "staircase", "overlap"])
def test_many_parts(kind, monkeypatch):
    """Many parts are never compared in pairs, neither where they are a tiling nor where they are none."""
    n, pairs = 20_000, []
    monkeypatch.setattr(entries, "_MOST_PAIRED", 100)
    compare = entries._check_pairs
    monkeypatch.setattr(entries, "_check_pairs", lambda key, boxes: (pairs.append(len(boxes)), compare(key, boxes)))
    boxes = {
        "columns": [((0, i), (3, 1)) for i in range(n)],
        "grid": [((i // 100, i % 100), (1, 1)) for i in range(n)],
        "staircase": [((i, i), (1, 1)) for i in range(n)],
        "overlap": [((0, i), (3, 2)) for i in range(n)],
    }[kind]
    random.Random(0).shuffle(boxes)
    if kind in {"staircase", "overlap"}:
        with pytest.raises(ValueError, match=r"not covered|overlapping or interlocked"):
            check_tiling("t", (n, n + 1), boxes)
    else:
        check_tiling("t", (3, n) if kind == "columns" else (n // 100, 100), boxes)
    assert pairs == ([n] if kind == "overlap" else [])


ENTRY = ("float32", (4, 3), [Chunk((0, 0), (4, 3), "f", 0, 48)])


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (("float33", *ENTRY[1:]), "unknown dtype 'float33'"),
        ((["float32"], *ENTRY[1:]), "unknown dtype list"),
        (("float32", (1 << 40, 1 << 40), ENTRY[2]), "impossible shape"),
        (("float32", (4, -3), ENTRY[2]), "a size was expected, found -3"),
        (("float32", (4, True), ENTRY[2]), "a size was expected, found True"),
        (("float32", 12, ENTRY[2]), "a shape was expected"),
        (("float32", (1,) * 65, ENTRY[2]), "a shape was expected"),
        (("float32", (4, 3), []), "not covered"),
    ],
)
def test_impossible_entries(entry, problem):
    """What cannot be is refused before anybody allocates by it."""
    with pytest.raises(ValueError, match=problem):
        checked_entry("t", *entry)
    assert checked_entry("t", *ENTRY).nbytes == 48


def test_nested_values_are_not_printed():
    """A message names the type of what is nested: it may be endless to print."""
    value = ()
    for _ in range(60):
        value = (value, value)
    with pytest.raises(ValueError, match="found tuple"):
        checked_count(value)
    with pytest.raises(ValueError, match="found tuple"):
        checked_extent([value])
