"""Tests of mtb_core.ckpt.tensors and mtb_core.ckpt.image: any box of any chunks, and what a reader refuses."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtb_core.ckpt.entries import Chunk, Part, TensorEntry
from mtb_core.ckpt.image import make_image
from mtb_core.ckpt.layout import DamagedCheckpoint
from mtb_core.ckpt.safetensors import SafetensorsStorage
from mtb_core.ckpt.storage import chunk_of, laid_out
from mtb_core.ckpt.tensors import TensorFiles, row_major_boxes


def images_of(parts, tensors):
    """The files in which one rank stores `parts`, staged, with the chunks of all parts."""
    layouts = laid_out(SafetensorsStorage(), parts, 0)
    images = [make_image(layout, parts, pinned=False) for layout in layouts]
    for image in images:
        image.stage([tensors[i] for i in image.parts])
    where = {i: chunk_of(parts[i], layout, slot) for layout in layouts for i, slot in layout.slots.items()}
    return images, [where[i] for i in range(len(parts))]


def test_the_image_shares_nothing():
    """What is staged stays as it was when the tensors change afterwards."""
    tensor = torch.ones(3)
    [image], _ = images_of([Part("w", "float32", (3,), (0,), (3,))], [tensor])
    tensor.zero_()
    assert image.targets[0].tolist() == [1, 1, 1]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_any_box(data):
    """Any box of a tensor, cut into any grid of chunks, is read right."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[axis]))
    parts = [t for t in (tensor.narrow(axis, 0, cut), tensor.narrow(axis, cut, shape[axis] - cut)) if t.numel()]
    at, specs = 0, []
    for t in parts:
        offset = tuple(at if d == axis else 0 for d in range(len(shape)))
        specs.append(Part("w", "int32", shape, offset, tuple(t.shape)))
        at += t.shape[axis]
    images, chunks = images_of(specs, parts)
    assert len(images) == len(parts)
    low = [data.draw(st.integers(0, n - 1)) for n in shape]
    high = [data.draw(st.integers(a + 1, n)) for a, n in zip(low, shape, strict=True)]
    sizes = tuple(b - a for a, b in zip(low, high, strict=True))
    files = TensorFiles(None, {"w": TensorEntry("int32", shape, tuple(chunks))})
    for image in images:
        files._open[image.name] = os.memfd_create(image.name)
        os.write(files._open[image.name], image.view())
    with files:
        out = np.zeros(sizes, np.int32)
        files.read("w", tuple(low), sizes, out)
    assert (out == tensor[tuple(slice(a, b) for a, b in zip(low, high, strict=True))].numpy()).all()


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.integers(1, 30))
def test_row_major_boxes(shape, limit):
    """Boxes follow each other in row-major order, cover all, and none is larger than asked for."""
    numbers = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    seen = []
    for offset, sizes in row_major_boxes(shape, limit):
        assert np.prod(sizes, dtype=int) <= limit
        seen += numbers[tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))].reshape(-1).tolist()
    assert seen == list(range(numbers.size))


@pytest.mark.parametrize(
    ("chunk", "problem"),
    [
        (Chunk((0,), (100,), "f", 0, 400), "f: it is too short to hold 'w'"),
        (Chunk((0,), (100,), "f", 1 << 50, 400), "f: it is too short to hold 'w'"),
        (Chunk((0,), (100,), "f", 0, 200), "the entry of 'w': it has 200 bytes"),
        (Chunk((0,), (100,), "g", 0, 400), "g: No such file"),
        (Chunk((0,), (100,), "../f", 0, 400), "not a plain path"),
        (Chunk((0,), (100,), "link", 0, 400), "a symbolic link"),
    ],
)
def test_impossible_places(tmp_path, chunk, problem):
    """A place that the file has not, or outside of the checkpoint, is named; nothing is read there."""
    (tmp_path / "c").mkdir()
    (tmp_path / "f").write_bytes(b"x" * 400)
    (tmp_path / "c" / "f").write_bytes(b"x" * 399)
    (tmp_path / "c" / "link").symlink_to(tmp_path / "f")
    files = TensorFiles(tmp_path / "c", {"w": TensorEntry("float32", (100,), (chunk,))})
    with files, pytest.raises(DamagedCheckpoint, match=problem):
        files.check_all()
    with files, pytest.raises(DamagedCheckpoint, match=problem):
        files.read("w", (0,), (100,), np.zeros(100, np.float32))
