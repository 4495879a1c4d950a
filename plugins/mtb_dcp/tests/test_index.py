"""Tests of mtb_dcp.index and mtb_dcp.inert: reading the index of torch.distributed.checkpoint, hostile ones included."""

import contextlib
import os
import pickle
import tracemalloc

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from mtb_core.ckpt import Chunk, TensorEntry
from mtb_dcp.index import metadata_bytes, parse_metadata
from mtb_dcp.inert import Name, read_pickle

ENTRIES = {
    "model/w": TensorEntry(
        "float32",
        (4, 3),
        (Chunk((0, 0), (2, 3), "__0_0.distcp", 0, 900), Chunk((2, 0), (2, 3), "__1_0.distcp", 64, 900)),
    ),
    "model/scale": TensorEntry("bfloat16", (), (Chunk((), (), "__0_0.distcp", 1024, 800),)),
}


class Runs:
    """Pickles to a call of `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_round_trip():
    """What is written is read back."""
    index = parse_metadata(metadata_bytes(ENTRIES))
    assert (dict(index.tensors), index.others) == (ENTRIES, ())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_reads_what_torch_writes(tmp_path):
    """An index written by torch itself is understood, its temporary path and entries of bytes included."""
    dcp.save({"a": {"w": torch.ones(2, 3), "n": 7}}, checkpoint_id=tmp_path)
    index = parse_metadata((tmp_path / ".metadata").read_bytes())
    assert index.tensors["a.w"].shape == (2, 3)
    assert index.others == ("a.n",)


@pytest.mark.parametrize(
    "hostile",
    [
        Runs(os.system, "touch {marker}"),
        Runs(exec, "open({marker!r}, 'w')"),
        Runs(eval, "open({marker!r}, 'w')"),
        Runs(getattr, torch.Size, "mro"),
        Runs(torch.zeros, 10),
        Runs(open, "{marker}", "w"),
    ],
)
@pytest.mark.parametrize("place", ["root", "planner_data", "key"])
def test_nothing_runs(tmp_path, hostile, place):
    """No callable in the pickle is called, wherever it stands; the name is refused."""
    marker = str(tmp_path / "marker")
    hostile = Runs(hostile.call[0], *(a.format(marker=marker) if isinstance(a, str) else a for a in hostile.call[1]))
    metadata = pickle.loads(metadata_bytes(ENTRIES))
    if place == "planner_data":
        metadata.planner_data = hostile
    elif place == "key":
        metadata.state_dict_metadata = {"x": hostile}
    data = pickle.dumps(hostile if place == "root" else metadata)
    with pytest.raises(ValueError, match="no place"):
        parse_metadata(data)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "data", [b"", b"not a pickle", pickle.dumps(1), pickle.dumps({"a": 1}), pickle.dumps(None), b"\x80\x04."]
)
def test_nonsense(data):
    """Anything else is refused with a ValueError."""
    with pytest.raises(ValueError, match=r"\w"):
        parse_metadata(data)


@given(st.data())
def test_damage_is_never_a_crash(data):
    """A changed byte gives a valid index or a ValueError, nothing else."""
    raw = bytearray(metadata_bytes(ENTRIES))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        parse_metadata(bytes(raw))


def _changed(change):
    metadata = pickle.loads(metadata_bytes(ENTRIES))
    change(metadata)
    return pickle.dumps(metadata)


def _chunk(metadata, key="model/w", index=0):
    return metadata.state_dict_metadata[key].chunks[index]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: setattr(_chunk(m), "sizes", torch.Size((3, 3))), "overlapping"),
        (lambda m: setattr(_chunk(m), "sizes", torch.Size((1, 3))), "not covered"),
        (lambda m: setattr(_chunk(m), "sizes", torch.Size((9, 3))), "outside"),
        (lambda m: setattr(m.state_dict_metadata["model/w"], "size", torch.Size((1 << 40, 1 << 40))), "impossible"),
        (lambda m: setattr(_chunk(m), "sizes", (2, -3)), "size was expected"),
        (lambda m: setattr(_chunk(m), "offsets", torch.Size((1, 0))), "stored nowhere"),
        (lambda m: m.storage_data.clear(), "stored nowhere"),
        (lambda m: setattr(next(iter(m.storage_data.values())), "offset", -1), "size was expected"),
        (lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", 5), "text was expected"),
        (lambda m: setattr(next(iter(m.storage_data.values())), "transform_descriptors", ["zstd"]), "transformed"),
        (lambda m: setattr(m, "state_dict_metadata", 3), "table was expected"),
    ],
)
def test_impossible_indexes(change, problem):
    """Sizes and places that cannot be are refused before anybody allocates by them."""
    with pytest.raises(ValueError, match=problem):
        parse_metadata(_changed(change))


NAMES = {("torch", "float32"): "float32", ("m", "Thing"): Name("thing"), ("torch", "Size"): Name("Size")}


def test_plain_values():
    """What pickle writes of plain values, in every protocol that has binary opcodes, is read as what it was."""
    value = {
        "a": [1, -2, 300, 1 << 40, True, None],
        "ü": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        5: {"b": "c" * 300},
    }
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert read_pickle(pickle.dumps(value, protocol), NAMES) == value


def doubled(depth):
    """A tuple of two of a tuple of two …: small as a pickle, and endless to hash, compare or print."""
    value = ()
    for _ in range(depth):
        value = (value, value)
    return value


HOSTILE = {
    "a long memo index": b"\x80\x02Nr\xff\xff\xff\x7f" + b"0.",
    "a memo index and nothing else": b"Nr\xff\xff\xff\x1f.",
    "a nested tuple as key": b"\x80\x02}" + pickle.dumps(doubled(60), 2)[2:-1] + b"Ks.",
    "a nested tuple as a name": pickle.dumps(doubled(60), 2)[2:-1] + b"\x8c\x01a\x93.",
    "a state for a class": b"cm\nThing\n}b.",
    "a state twice": b"cm\nThing\n)R}b}b.",
    "a call of a value": b"ctorch\nfloat32\n)R.",
    "more lists than bytes": b"]" * 100_000 + b".",
    "more notes than bytes": b"N" + b"\x94" * 100_000 + b".",
    "a text that is not there": b"X\xff\xff\xff\x7fabc.",
    "an endless line": b"c" + b"m" * 1000,
    "half of a surrogate pair": b"X\x03\0\0\0\xed\xa0\x80.",
    "pop": b"NN0.",
    "two values": b"NN.",
}
#: Refused by the reader itself, whatever names are known.
ALWAYS = sorted(set(HOSTILE) - {"a memo index and nothing else"})


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_pickles(kind):
    """Small pickles that would take up memory or time, or change a class, are refused at once, with little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"\w"):
            parse_metadata(HOSTILE[kind])
        assert tracemalloc.get_traced_memory()[1] < 100 * len(HOSTILE[kind]) + 300_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ALWAYS)
def test_hostile_pickles_of_known_names(kind):
    """The same where every name in them is known."""
    with pytest.raises(ValueError, match=r"\w"):
        read_pickle(HOSTILE[kind], NAMES)


def test_nested_sizes_are_refused():
    """A shape that is a nested tuple is named by its type, not printed."""
    metadata = pickle.loads(metadata_bytes(ENTRIES))
    metadata.state_dict_metadata["model/w"].chunks[0].sizes = (doubled(60), 3)
    with pytest.raises(ValueError, match="a size was expected, found tuple"):
        parse_metadata(pickle.dumps(metadata))
