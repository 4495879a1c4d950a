"""Reading traces in pieces: whatever the size of the pieces, nothing is lost, added or rounded."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal

import pytest

from mtb_core import ConfigError
from mtb_profile import reading
from mtb_profile.loading import load_trace
from mtb_profile.reading import TraceFile

#: What might be taken for the border between two events, or for the end of them, inside an event.
NASTY = [
    {"ph": "X", "name": 'a "},{" b', "ts": 1.5, "dur": 2, "args": {"x": [{"y": 1}, {"y": 2}]}},
    {"ph": "X", "name": "\\", "ts": 3, "dur": 0.001, "args": {"x": "}]}"}},
    {"ph": "X", "name": '"traceEvents": [', "ts": 4, "dur": 1, "args": None},
    {"ph": "i", "name": "no duration", "ts": 5},
]


def content(events, **tail):
    return {"note": '"traceEvents": [{"ph": 1}]', "traceEvents": events, **tail}


@pytest.mark.parametrize("chunk", [16, 37, 64, 301, 4096])
@pytest.mark.parametrize("indent", [None, 1])
def test_any_chunk_size(tmp_path, monkeypatch, chunk, indent):
    """Cut anywhere, the events and the keys around them are those of a plain JSON parser."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", chunk)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content(NASTY * 9, after={"k": [1, 2]}, last="]}"), indent=indent))
    file = TraceFile(path)
    names = [event.name for batch in file.batches() for event in batch]
    assert names == [event["name"] for event in NASTY * 9]
    assert file.head == {"note": '"traceEvents": [{"ph": 1}]', "after": {"k": [1, 2]}, "last": "]}"}


def test_much_behind_the_events(tmp_path, monkeypatch):
    """What follows the events may be as long and as nested as it likes."""
    after = [[{"a": [n, {"b": []}]}, {"c": "]}"}] for n in range(500)]
    for chunk in (64, 1 << 20):
        monkeypatch.setattr(reading, "CHUNK_BYTES", chunk)
        path = tmp_path / "t.json"
        path.write_text(json.dumps(content(NASTY * 9, after=after)))
        file = TraceFile(path)
        assert sum(map(len, file.batches())) == 36
        assert file.head["after"] == after


def test_memory_is_that_of_a_chunk(tmp_path, monkeypatch):
    """No batch holds more than a chunk of events."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 1000)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content(NASTY * 500)))
    sizes = [len(batch) for batch in TraceFile(path).batches()]
    assert sum(sizes) == 2000
    assert max(sizes) <= 2 * 1000 / 40


def test_times_are_exact(tmp_path):
    """Microseconds with three decimals since 1970 have more digits than a double holds, and keep them."""
    path = tmp_path / "t.json"
    path.write_text('[{"ph":"X","cat":"kernel","name":"k","ts":1682725898236567.123,"dur":0.001,"pid":0,"tid":7}]')
    (event,) = next(TraceFile(path).batches())
    assert event.ts == Decimal("1682725898236567.123")
    assert load_trace(path).work.start.tolist() == [1682725898236567123]
    assert load_trace(path).work.end.tolist() == [1682725898236567124]


KERNEL = '{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":2,"pid":0,"tid":7,"args":{"correlation":1,"device":0}}'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"ts":1', '"ts":1e30'),
        ('"ts":1', '"ts":4e15'),
        ('"ts":1', '"ts":9.9e15'),
        ('"ts":1', '"ts":-4e15'),
        ('"ts":1,"dur":2', '"ts":2e15,"dur":2e15'),
        ('"ts":1', '"ts":1e999999'),
        ('"ts":1', '"ts":"NaN"'),
        ('"ts":1', '"ts":"Infinity"'),
        ('"dur":2', '"dur":"NaN"'),
        ('"dur":2', '"dur":"sNaN"'),
        ('"dur":2', '"dur":3e15'),
        ('"head":1', '"baseTimeNanoseconds":1' + "0" * 30),
        ('"args":{', f'"args":{{"x":{"[" * 100_000}{"]" * 100_000},'),
    ],
)
def test_times_that_no_trace_has(tmp_path, old, new):
    """A time that is no number, or beyond all clocks, is damage, wherever it stands; so is endless nesting."""
    path = tmp_path / "t.json"
    path.write_text(f'{{"head":1,"traceEvents":[{KERNEL},{KERNEL}]}}'.replace(old, new, 1))
    with pytest.raises(ConfigError, match="is damaged"):
        load_trace(path)


@pytest.mark.parametrize(
    ("old", "new", "kernels"),
    [
        ('"correlation":1', '"correlation":1' + "0" * 30, 2),
        ('"correlation":1', '"correlation":-5', 2),
        ('"cat":"kernel"', '"cat":["kernel"]', 1),
        ('"pid":0', '"pid":[0]', 2),
        ('"tid":7', '"tid":{"a":7}', 2),
        ('"device":0', '"device":[0]', 2),
        (
            '"head":1',
            '"distributedInfo":{"backend":[1],"world_size":1000000000000000,"pg_config":[[],{"pg_size":"2"}]}',
            2,
        ),
    ],
)
def test_values_of_another_kind(tmp_path, old, new, kernels):
    """What is of no kind that its place has says nothing; the rest of the trace counts."""
    path = tmp_path / "t.json"
    path.write_text(f'{{"head":1,"traceEvents":[{KERNEL},{KERNEL}]}}'.replace(old, new, 1))
    trace = load_trace(path)
    assert len(trace.work) == kernels
    assert (trace.devices, trace.backend) == (1, None)


def test_compressed_whatever_its_name(tmp_path):
    """Gzip is known by its content; a bare list of events, with or without its end, is a trace too."""
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(json.dumps(content(NASTY)).encode()))
    assert sum(map(len, TraceFile(path).batches())) == 4
    for text in (json.dumps(NASTY), json.dumps(NASTY)[:-1], json.dumps(NASTY)[:-1] + ",\n"):
        path.write_text(text)
        assert sum(map(len, TraceFile(path).batches())) == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1}', 'it has no list "traceEvents"'),
        (b"not json", 'it has no list "traceEvents"'),
        (gzip.compress(json.dumps(content(NASTY * 99)).encode())[:-20], "cannot be read"),
        (json.dumps(content(NASTY * 99)).encode()[:-150], "is damaged"),
        (b'{"traceEvents": [{"ph": "X", "ts": "yesterday"}]}', "is damaged"),
        (b'{"traceEvents": [{"ph": "X"}, 7, {"ph": "X"}]}', "is damaged"),
    ],
)
def test_damage_is_refused(tmp_path, data, message):
    """A file that is cut off, or no trace, is refused with its name and what is wrong."""
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        list(TraceFile(path).batches())
    assert str(path) in str(caught.value)
