"""Tests of mtb_dcp.archives and mtb_dcp.storage: files that torch reads, and reading what torch writes."""

import io
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from mtb_core.ckpt import CARRIERS, DamagedCheckpoint, Part, TensorEntry, carrier
from mtb_core.ckpt.image import make_image
from mtb_core.ckpt.storage import chunk_of, laid_out
from mtb_dcp.archives import locate
from mtb_dcp.storage import DcpStorage

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
    storage = DcpStorage()
    [layout] = laid_out(storage, parts, 0)
    image = make_image(layout, parts, pinned=False)
    image.stage(list(tensors.values()))
    (folder / image.name).write_bytes(image.view())
    chunks = [chunk_of(part, layout, layout.slots[i]) for i, part in enumerate(parts)]
    entries = {p.key: TensorEntry(p.dtype, p.shape, (c,)) for p, c in zip(parts, chunks, strict=True)}
    for name, data in storage.index(entries).items():
        (folder / name).write_bytes(data)
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
    entries = DcpStorage().entries(tmp_path)
    for most in (1, 24, 1 << 20):
        with DcpStorage().reader(tmp_path, entries) as files:
            files.check_all()
            got = {k: b"".join(b.tobytes() for _, b in files.blocks(k, most)) for k in tensors}
        assert got == {k: raw(t) for k, t in tensors.items()}


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
    "a long directory": saved(torch.ones(2, 2))[:-10] + (1 << 20).to_bytes(4, "little") + b"\0" * 6,
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
        DcpStorage().reader(tmp_path, entries) as files,
        pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp: it is too short"),
    ):
        files.check_all()
