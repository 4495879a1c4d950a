"""Tests of mtb_core.ckpt.safetensors: what others read of it, and files that are not what they say."""

import json
import os
import re
import tracemalloc

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from mtb_checkpoint import verify_checkpoint
from mtb_core.api.errors import RunFailed
from mtb_core.api.flat import fragment_pieces
from mtb_core.api.values import Piece, State
from mtb_core.ckpt import files
from mtb_core.ckpt.dtypes import CARRIERS, SAFETENSORS, carrier
from mtb_core.ckpt.layout import DamagedCheckpoint
from mtb_core.ckpt.manager import CheckpointManager
from mtb_core.ckpt.opened import open_checkpoint
from mtb_core.ckpt.safetensors import SafetensorsStorage

from .ckpt_ranks import resealed, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def some_tensors():
    """Every dtype, no dimensions, no elements, odd sizes, odd names."""
    torch.manual_seed(0)
    tensors = {
        "model/scalar": torch.tensor(1.5),
        "model/empty": torch.zeros(0, 3),
        "model/empty and last": torch.zeros(3, 0, dtype=torch.bool),
        "model/wide": torch.randn(3, 4, 5),
        "model/even": torch.randn(8, 8),
        'optim/a "quoted" \\ name': torch.randn(3),
        "ü/日本/\U0001f600/\n": torch.randn(3),
        "": torch.randn(1),
    }
    for name in SAFETENSORS:
        tensors[f"dtype/{name}"] = torch.randint(0, 2, (5, 3)).to(getattr(torch, name))
        tensors[f"dtype/{name}/one"] = torch.ones(()).to(getattr(torch, name))
    tensors["model/nan"] = torch.tensor([0x7FC00001, -0x3FFFFF, 1], dtype=torch.int32).view(torch.float32)
    return tensors


def state_of(tensors):
    return State({k: [Piece(t, tuple(t.shape), (0,) * t.dim())] for k, t in tensors.items()})


def write(folder, state, step=1):
    manager = CheckpointManager(folder, asynchronous=False)
    manager.preflight(state)
    manager.save(step, state)
    return folder / f"step_{step:08d}"


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bits(tensors):
    return {key: (tensor.dtype, tuple(tensor.shape), raw(tensor)) for key, tensor in tensors.items()}


def test_round_trip(tmp_path):
    """Every dtype and shape comes back to the bit, whole and in blocks of any size."""
    tensors = some_tensors()
    path = write(tmp_path, state_of(tensors))
    assert verify_checkpoint(path).ok
    filled = {k: torch.full_like(t, 1) for k, t in tensors.items()}
    CheckpointManager(tmp_path).load(path, state_of(filled))
    assert bits(filled) == bits(tensors)
    for most in (1, 24, 1 << 20):
        with open_checkpoint(path).tensors() as stored:
            got = {k: b"".join(b.tobytes() for _, b in stored.blocks(k, most)) for k in tensors}
        assert got == {k: raw(t) for k, t in tensors.items()}


def test_the_library_reads_it(tmp_path):
    """The safetensors library gives every tensor to the bit; elements are aligned to their size."""
    tensors = some_tensors()
    path = write(tmp_path, state_of(tensors))
    with safe_open(path / "rank_00000.safetensors", "pt") as file:
        names = list(file.keys())
        assert bits({name: file.get_tensor(name) for name in names}) == bits(tensors)
    for entry in open_checkpoint(path).entries.values():
        assert entry.chunks[0].start % carrier(entry.dtype).itemsize == 0
        if entry.nbytes % 64 == 0:  # as weights of models are: copies into the file are as fast as they can be
            assert entry.chunks[0].start % 64 == 0


def flat_ranks(rank, folder, tensors):
    """Two ranks hold flat halves of every tensor: up to three parts of it each."""
    pieces = {}
    for key, tensor in tensors.items():
        half = (tensor.numel() + 1) // 2
        start = rank * half
        flat = tensor.reshape(-1)[start : start + half].clone()
        own = fragment_pieces(flat, tuple(tensor.shape), start) if tensor.dim() else [Piece(tensor, (), ())]
        pieces[key] = own or [Piece(tensor, tuple(tensor.shape), (0,) * tensor.dim())]
    with CheckpointManager(folder) as manager:
        manager.preflight(State(pieces))
        manager.save(1, State(pieces))


def test_torch_reads_it(tmp_path):
    """The HuggingFaceStorageReader of torch puts together what ranks hold in several parts, whole and cut otherwise."""
    tensors = some_tensors() | {"model/flat": torch.arange(105.0).reshape(3, 5, 7)}
    run_ranks(2, flat_ranks, tmp_path, tensors)
    path = tmp_path / "step_00000001"
    assert verify_checkpoint(path).ok
    assert (path / "rank_00000.1.safetensors").exists()
    out = {k: torch.zeros_like(t) for k, t in tensors.items()}
    dcp.load(out, storage_reader=HuggingFaceStorageReader(str(path)))
    assert bits(out) == bits(tensors)


def other_ranks(rank, path, tensor):
    """Three ranks, by torch alone, read a tensor in shards along its second dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    sharded = distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(1)])
    dcp.load({"model/flat": sharded}, storage_reader=HuggingFaceStorageReader(str(path)))
    assert torch.equal(sharded.full_tensor(), tensor)


def test_torch_reshards_it(tmp_path):
    """The same reader loads what two ranks have saved in flat halves into DTensors of three ranks."""
    tensor = torch.arange(105.0).reshape(3, 5, 7)
    run_ranks(2, flat_ranks, tmp_path, {"model/flat": tensor})
    run_ranks(3, other_ranks, tmp_path / "step_00000001", tensor)


def test_no_pickle(tmp_path, monkeypatch):
    """Saving and reading work where nothing can be pickled, and no file is a pickle or an archive of one."""
    import pickle

    state = state_of(some_tensors())

    def refuse(*_, **__):
        raise AssertionError("a pickle")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, refuse)
    path = write(tmp_path, state)
    assert verify_checkpoint(path).ok
    CheckpointManager(tmp_path).load(path, state)
    for file in path.rglob("*"):
        assert file.is_dir() or not file.read_bytes().startswith((b"\x80", b"PK")), file


@pytest.mark.parametrize("dtype", sorted(set(CARRIERS) - set(SAFETENSORS)))
def test_dtypes_without_a_name(tmp_path, dtype):
    """A dtype that safetensors lacks is refused by name, before anything is written."""
    manager = CheckpointManager(tmp_path)
    state = state_of({"model/z": torch.ones(2, dtype=getattr(torch, dtype))})
    with pytest.raises(RunFailed, match=f"'model/z' on rank 0 is {dtype}, which the checkpoint format cannot store"):
        manager.save(1, state)
    assert list(tmp_path.glob("*")) == []


def test_a_reserved_key(tmp_path):
    """The one name that a safetensors file keeps for itself is refused."""
    with pytest.raises(RunFailed, match="'__metadata__' is not a possible key"):
        CheckpointManager(tmp_path).preflight(state_of({"__metadata__": torch.ones(2)}))


@pytest.fixture
def path(tmp_path):
    """A small checkpoint to change."""
    return write(tmp_path, state_of({"model/a": torch.arange(6.0).reshape(2, 3), "model/b": torch.ones(4)}))


def index_of(path):
    return json.loads((path / "index.json").read_text())


def reindexed(path, change):
    """Change ``index.json`` and make manifest and READY fit: a forger, not an accident."""
    index = index_of(path)
    changed = change(index)
    data = changed if isinstance(changed, bytes) else json.dumps(index).encode()
    (path / "index.json").write_bytes(data)
    seal = {"size": len(data), "digest": files.digest_bytes(data)}
    resealed(path, lambda m: m["files"].update({"index.json": seal}))


def set_part(key, place, value):
    def change(index):
        index["tensors"][key]["parts"][0][place] = value

    return change


def nested(depth):
    return b"[" * depth + b"]" * depth


INDEXES = {
    "not JSON": (lambda i: b"{      ", "Expecting"),
    "a list": (lambda i: b"[]" + b" " * 20, "not an index"),
    "another version": (lambda i: i.update(index_version=2), "version 1"),
    "no version": (lambda i: i.pop("index_version") and None, "version 1"),
    "no tensors": (lambda i: i.pop("tensors") and None, "no table of tensors"),
    "a tensor twice": (lambda i: json.dumps(i).replace("model/b", "model/a").encode(), "twice"),
    "files that are none": (lambda i: i.update(files=[["x"]]), "not the name of a file of tensors"),
    "files twice": (lambda i: i.update(files=i["files"] * 2), "different files"),
    "up": (lambda i: i.update(files=["../rank_00000.safetensors"]), "not the name of a file of tensors"),
    "absolute": (lambda i: i.update(files=["/etc/passwd"]), "not the name of a file of tensors"),
    "another file": (lambda i: i.update(files=["state.json"]), "not the name of a file of tensors"),
    "an unlisted file": (lambda i: i.update(files=["rank_00007.safetensors"]), "the manifest does not list"),
    "no such number": (set_part("model/a", 0, 1), "IndexError"),
    "a negative number": (set_part("model/a", 0, -1), "a size was expected"),
    "before the start": (set_part("model/a", 1, -8), "a size was expected"),
    "past the end": (set_part("model/a", 1, 1 << 30), "too short to hold"),
    "far past the end": (set_part("model/a", 1, 1 << 60), "a size was expected"),
    "half a place": (set_part("model/a", 1, 0.5), "a size was expected"),
    "over another": (lambda i: set_part("model/b", 1, i["tensors"]["model/a"]["parts"][0][1])(i), "overlap in"),
    "another place": (set_part("model/b", 1, 0), "something else than index.json"),
    "outside of the tensor": (set_part("model/a", 2, [1, 0]), "outside of it"),
    "too large": (set_part("model/a", 3, [1 << 50, 1 << 50]), "a size was expected"),
    "not covered": (set_part("model/a", 3, [1, 3]), "not covered"),
    "another dtype": (lambda i: i["tensors"]["model/a"].update(dtype="I32"), "something else than index.json"),
    "no dtype": (lambda i: i["tensors"]["model/a"].update(dtype="F33"), "described wrongly"),
    "a part that is none": (lambda i: i["tensors"]["model/a"].update(parts=[7]), "described wrongly"),
    "a tensor that is none": (lambda i: i["tensors"].update({"model/a": []}), "described wrongly"),
    "a tensor less": (lambda i: i["tensors"].pop("model/b") and None, "something else than index.json"),
    "twice in a file": (
        lambda i: i["tensors"]["model/a"].update(
            parts=[
                [0, i["tensors"]["model/a"]["parts"][0][1], [0, 0], [1, 3]],
                [0, i["tensors"]["model/a"]["parts"][0][1] + 12, [1, 0], [1, 3]],
            ]
        ),
        "two parts of 'model/a'",
    ),
    "deep": (lambda i: nested(500) + b" " * 4000, "not an index|nested too deeply"),
    "deeper": (lambda i: nested(100_000) + b" " * 1_000_000, "nested too deeply"),
    "many lists": (lambda i: b"[" + b"[]," * 1_000_000 + b"[]]", "more lists and tables"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_forged_indexes(path, kind):
    """An index that is not of such a checkpoint, however well sealed, is refused with little memory."""
    change, problem = INDEXES[kind]
    reindexed(path, change)
    size = (path / "index.json").stat().st_size
    tracemalloc.start()
    try:
        found = verify_checkpoint(path).problems
        assert len(found) == 1
        assert tracemalloc.get_traced_memory()[1] < 4 * size + 3_000_000
    finally:
        tracemalloc.stop()
    assert re.search(problem, found[0].problem), found[0].problem


def reheaded(path, change, *, tail=b""):
    """Change the header of the file of tensors (or its bytes), and make manifest and READY fit."""
    name = "rank_00000.safetensors"
    data = (path / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    if not isinstance(changed, bytes):
        changed = json.dumps(header, separators=(",", ":")).encode()
    if len(changed) <= length:  # the elements stay where the index says
        changed = changed.ljust(length)
    data = len(changed).to_bytes(8, "little") + changed + data[8 + length :] + tail
    (path / name).write_bytes(data)
    seal = {"size": len(data), "digest": files.digest_bytes(data)}
    resealed(path, lambda m: m["files"].update({name: seal}))


def set_offsets(key, offsets):
    return lambda h: h[key].update(data_offsets=offsets)


HEADERS = {
    "overlapping": set_offsets("model/a", [0, 24]),
    "a gap": set_offsets("model/a", [24, 48]),
    "beyond the end": set_offsets("model/a", [16, 1 << 40]),
    "negative": set_offsets("model/a", [-8, 16]),
    "three offsets": set_offsets("model/a", [16, 24, 40]),
    "another shape": lambda h: h["model/a"].update(shape=[3, 2]),
    "another dtype": lambda h: h["model/a"].update(dtype="I32"),
    "an unknown dtype": lambda h: h["model/a"].update(dtype="F4"),
    "another name": lambda h: h.update({"model/c": h.pop("model/b")}),
    "a tensor more": lambda h: h.update({"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
    "a tensor less": lambda h: h.pop("model/b") and None,
    "a tensor twice": lambda h: json.dumps(h, separators=(",", ":")).replace("model/b", "model/a").encode(),
    "no sharding": lambda h: h["__metadata__"].pop("DCP_SHARDING_INFO") and None,
    "other sharding": lambda h: h["__metadata__"].update(
        DCP_SHARDING_INFO=h["__metadata__"]["DCP_SHARDING_INFO"].replace("[0,0]", "[9,0]")
    ),
    "not JSON": lambda h: b"{",
    "a list": lambda h: b"[]",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_forged_headers(path, kind):
    """A header that says something else than the index, however well sealed, is found by verify."""
    reheaded(path, HEADERS[kind])
    [problem] = verify_checkpoint(path).problems
    assert problem.file == "rank_00000.safetensors"
    assert (
        "header" in problem.problem
        or "place of" in problem.problem
        or "twice" in problem.problem
        or ("tensors end" in problem.problem or "expected" in problem.problem or "Expecting" in problem.problem)
    )


@pytest.mark.parametrize("length", [0, 7, 1 << 30, 1 << 63, (1 << 64) - 1])
def test_header_lengths(path, length):
    """A header longer than its file, or than the format allows, is refused before it is read."""
    name = "rank_00000.safetensors"
    data = length.to_bytes(8, "little") + (path / name).read_bytes()[8:]
    (path / name).write_bytes(data)
    seal = {"size": len(data), "digest": files.digest_bytes(data)}
    resealed(path, lambda m: m["files"].update({name: seal}))
    tracemalloc.start()
    try:
        assert [p.file for p in verify_checkpoint(path).problems] == [name]
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 3, 8, 100, -1])
def test_truncated(path, size):
    """A file that ends too early is named by verify and by whoever reads the tensors."""
    name = "rank_00000.safetensors"
    whole = (path / name).stat().st_size
    checkpoint = open_checkpoint(path)
    os.truncate(path / name, size if size >= 0 else whole - 1)
    assert [p.file for p in verify_checkpoint(path).problems] == [name]
    last = max(checkpoint.entries, key=lambda key: checkpoint.entries[key].chunks[0].start)
    shape = checkpoint.entries[last].shape
    with checkpoint.tensors() as stored, pytest.raises(DamagedCheckpoint, match="too short"):
        stored.read(last, (0,) * len(shape), shape, np.zeros(shape, np.float32))


def test_a_tensor_that_no_index_has(path):
    """A further file of a rank, listed by the manifest and unknown to the index, is found: torch's reader would take it."""
    data = (path / "rank_00000.safetensors").read_bytes()
    (path / "rank_00000.1.safetensors").write_bytes(data)
    seal = {"size": len(data), "digest": files.digest_bytes(data)}
    resealed(path, lambda m: m["files"].update({"rank_00000.1.safetensors": seal}))
    [problem] = verify_checkpoint(path).problems
    assert problem.file == "rank_00000.1.safetensors"


def test_overhead():
    """What a tensor costs besides its elements is small: its lines in header and index."""
    from mtb_core.ckpt.entries import Part, TensorEntry
    from mtb_core.ckpt.storage import chunk_of

    storage = SafetensorsStorage()
    parts = [Part(f"model/blocks.{i:04d}.attention.weight", "float32", (8, 8), (0, 0), (8, 8)) for i in range(1000)]
    [layout] = storage.lay_out(parts, 0)
    chunks = {
        p.key: TensorEntry(p.dtype, p.shape, (chunk_of(p, layout, layout.slots[i]),)) for i, p in enumerate(parts)
    }
    [index] = storage.index(chunks).values()
    assert (layout.size - 1000 * 256 + len(index)) / 1000 < 300
