"""The files of a profiled run: ``trace/rank_00000.json.gz``, and the memory timeline beside it."""

from __future__ import annotations

import csv
import gzip
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from .reading import TraceFile

_CHUNK = 1 << 20
#: Texts in a trace's head and tail that tell of the machine.
_HOST_NAME = re.compile(rb'"host_name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,?')
_TRACE_NAME = re.compile(rb'("traceName"\s*:\s*")(?:[^"\\]|\\.)*"')


def trace_path(folder: Path, rank: int) -> Path:
    """Where a rank's trace is."""
    return folder / f"rank_{rank:05d}.json.gz"


def publish_trace(raw: Path, path: Path) -> None:
    """Compress the profiler's own file, without the host's name and the path it was written to; whole or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    size = raw.stat().st_size
    with raw.open("rb") as source, gzip.open(temporary, "wb", compresslevel=5) as target:
        target.write(_HOST_NAME.sub(b"", source.read(_CHUNK)))
        while size - source.tell() > _CHUNK:
            target.write(source.read(min(_CHUNK, size - source.tell() - _CHUNK)))
        tail = _TRACE_NAME.sub(rb"\g<1>" + path.name.encode() + b'"', source.read())
        target.write(tail)
    temporary.replace(path)


class _Memory(msgspec.Struct, gc=False):
    """Arguments of an event ``[memory]``."""

    allocated: int | None = msgspec.field(default=None, name="Total Allocated")
    reserved: int | None = msgspec.field(default=None, name="Total Reserved")
    change: int | None = msgspec.field(default=None, name="Bytes")
    device_type: int | None = msgspec.field(default=None, name="Device Type")
    device: int | None = msgspec.field(default=None, name="Device Id")


class _Event(msgspec.Struct, gc=False):
    name: Any = None
    ts: Decimal | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


def memory_timeline(trace: Path, output: Path) -> None:
    """Write each allocation and release that `trace` records as a line of CSV: when, where, how much there is then.

    Columns: ``time_us`` (of the trace), ``device`` (``cpu`` or ``cuda:N``), ``change_bytes``, ``allocated_bytes``,
    ``reserved_bytes`` (by the allocator; 0 on a CPU).
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    decoder = msgspec.json.Decoder(_Memory)
    with output.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["time_us", "device", "change_bytes", "allocated_bytes", "reserved_bytes"])
        for batch in TraceFile(trace, decoder=msgspec.json.Decoder(list[_Event])).batches():
            for event in batch:
                if event.name == "[memory]":
                    found = decoder.decode(event.args)
                    device = f"cuda:{found.device}" if found.device_type == 1 else "cpu"
                    rows.writerow([event.ts, device, found.change, found.allocated, found.reserved])
