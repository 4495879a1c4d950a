"""Tests of mtb_core.ckpt.tensors and mtb_core.ckpt.image: files that torch reads, and reading what torch writes."""

import io
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from mtb_core.ckpt.dtypes import CARRIERS, carrier
from mtb_core.ckpt.image import make_image, metadata_bytes
from mtb_core.ckpt.layout import DamagedCheckpoint
from mtb_core.ckpt.metadata import TensorEntry, parse_metadata
from mtb_core.ckpt.plan import Part
from mtb_core.ckpt.tensors import TensorFiles, locate, row_major_boxes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def some_tensors():
    torch.manual_seed(0)
    tensors = {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "wide": torch.randn(3, 4, 5)}
    for name in CARRIERS:
        tensors[f"dtype/{name}"] = torch.randint(0, 2, (4, 3)).to(getattr(torch, name))
    return tensors


def write(folder, tensors):
    """Write `tensors` as one rank would."""
    parts = [
        Part(k, str(t.dtype).removeprefix("torch."), tuple(t.shape), (0,) * t.dim(), tuple(t.shape))
        for k, t in tensors.items()
    ]
    image = make_image(parts, "__0_0.distcp", pinned=False)
    image.stage(list(tensors.values()))
    (folder / "__0_0.distcp").write_bytes(image.view())
    entries = {p.key: TensorEntry(p.dtype, p.shape, (c,)) for p, c in zip(parts, image.chunks, strict=True)}
    (folder / ".metadata").write_bytes(metadata_bytes(entries))
    return entries


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_torch_reads_what_we_write(tmp_path):
    """torch.distributed.checkpoint loads our files, every dtype, to the bit."""
    tensors = some_tensors()
    write(tmp_path, tensors)
    out = {k: torch.zeros_like(t) for k, t in tensors.items()}
    dcp.load(out, checkpoint_id=tmp_path)
    assert {k: raw(t) for k, t in out.items()} == {k: raw(t) for k, t in tensors.items()}


@pytest.mark.parametrize("writer", [write, lambda folder, tensors: dcp.save(tensors, checkpoint_id=folder)])
def test_we_read_what_is_written(tmp_path, writer):
    """Our reader gives every element of files written by us and by torch, in blocks of any size."""
    tensors = some_tensors()
    writer(tmp_path, tensors)
    index = parse_metadata((tmp_path / ".metadata").read_bytes())
    for most in (1, 24, 1 << 20):
        with TensorFiles(tmp_path, index.tensors) as files:
            files.check_all()
            got = {k: b"".join(b.tobytes() for _, b in files.blocks(k, most)) for k in tensors}
        assert got == {k: raw(t) for k, t in tensors.items()}


def test_the_image_shares_nothing(tmp_path):
    """What is staged stays as it was when the tensors change afterwards."""
    tensor = torch.ones(3)
    image = make_image([Part("w", "float32", (3,), (0,), (3,))], "f", pinned=False)
    image.stage([tensor])
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
    image = make_image(specs, "f", pinned=False)
    image.stage(parts)
    low = [data.draw(st.integers(0, n - 1)) for n in shape]
    high = [data.draw(st.integers(a + 1, n)) for a, n in zip(low, shape, strict=True)]
    sizes = tuple(b - a for a, b in zip(low, high, strict=True))
    descriptor = os.memfd_create("f")
    os.write(descriptor, image.view())
    files = TensorFiles(None, {"w": TensorEntry("int32", shape, tuple(image.chunks))})
    files._open["f"] = descriptor
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


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def rezipped(change, compression=zipfile.ZIP_STORED):
    """The archive of a (2, 2) float32 tensor after ``change(members)``."""
    source = zipfile.ZipFile(io.BytesIO(saved(torch.ones(2, 2))))
    members = {name: source.read(name) for name in source.namelist()}
    change(members)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


class Runs:
    def __reduce__(self):
        return (os.mkdir, ("hostile-entry-ran",))


HOSTILE = {
    "a pickle that runs code": saved(Runs()),
    "code in the description": rezipped(lambda m: m.update({"archive/data.pkl": pickle.dumps(Runs())})),
    "a dict": saved({"a": torch.ones(2, 2)}),
    "another shape": saved(torch.ones(4)),
    "another dtype": saved(torch.ones(2, 2, dtype=torch.int32)),
    "transposed": saved(torch.arange(4.0).reshape(2, 2).t()),
    "a view of something larger": saved(torch.ones(4, 2)[:2]),
    "an expanded scalar": saved(torch.ones(1).expand(2, 2)),
    "compressed": rezipped(lambda _: None, zipfile.ZIP_DEFLATED),
    "fewer elements": rezipped(lambda m: m.update({"archive/data/0": b"\0" * 8})),
    "big-endian": rezipped(lambda m: m.update({"archive/byteorder": b"big"})),
    "a long description": rezipped(lambda m: m.update({"archive/data.pkl": b"N" * (1 << 17)})),
    "no elements": rezipped(lambda m: m.pop("archive/data/0")),
    "no archive": os.urandom(900),
    "nothing": b"",
    "a bare pickle": pickle.dumps(Runs()),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_entries(kind, tmp_path, monkeypatch):
    """An entry that is not the contiguous tensor that was announced is refused; nothing in it runs."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"\w"):
        locate(io.BytesIO(HOSTILE[kind]), "float32", (2, 2))
    assert list(tmp_path.iterdir()) == []


def test_a_good_entry():
    """The same checks let a good entry through."""
    data = saved(torch.full((2, 2), 3.0))
    start = locate(io.BytesIO(data), "float32", (2, 2))
    assert np.frombuffer(data[start : start + 16], carrier("float32")).tolist() == [3.0] * 4


def test_truncated_file(tmp_path):
    """A file that ends too early is named."""
    entries = write(tmp_path, {"w": torch.ones(100)})
    os.truncate(tmp_path / "__0_0.distcp", 200)
    with (
        TensorFiles(tmp_path, entries) as files,
        pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp: it is too short"),
    ):
        files.check_all()
