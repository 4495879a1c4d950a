"""From a trace file to the compact columns that everything else works on: some 30 bytes for each event that counts."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from . import kinds
from .groups import Unnamed, unnamed_group
from .kinds import Kind
from .reading import Args, Event, TraceFile
from .spans import Int64
from .values import TIME_LIMIT_NS, UnusableError, identifier, nanoseconds, number_of_ranks

_NO_ARGS = Args()


@attrs.frozen(eq=False)
class Table:
    """Events as columns, in the file's order.

    Attributes:
        launch: when the host issued it, ns; -1 where the trace does not link the two. Of operators: their own start.
        kind: a `Kind`.
        thread: index into `RankTrace.threads`; of device work, its stream.
    """

    start: Int64
    end: Int64
    launch: Int64
    kind: NDArray[np.int8]
    thread: NDArray[np.int32]

    def where(self, mask: NDArray[np.bool_]) -> Table:
        """The events that `mask` chooses."""
        return Table(self.start[mask], self.end[mask], self.launch[mask], self.kind[mask], self.thread[mask])

    def __len__(self) -> int:
        return len(self.start)


@attrs.frozen
class Annotation:
    """A range that the program, or a library, has named."""

    name: str
    start: int
    end: int
    thread: int


@attrs.frozen
class Collective:
    """One collective on one rank.

    Attributes:
        operation: ``all_reduce``, ``all_gather``, …
        group: what tells its process group from others; empty where the trace does not say.
        group_known: whether collectives of other ranks with the same `group` are of the same group.
        message_bytes: S of nccl-tests; None where the trace does not say.
        launch: when the host issued it; -1: unknown.
    """

    operation: str
    start: int
    end: int
    launch: int
    thread: int
    group: str = ""
    group_known: bool = True
    group_size: int | None = None
    dtype: str | None = None
    message_bytes: int | None = None


@attrs.frozen(eq=False)
class RankTrace:
    """One rank's trace; times in ns since the epoch that the file counts from.

    Attributes:
        on_device: the work is that of an accelerator; otherwise of CPU operators.
        work: what the device did, or the CPU operators that compute; collectives included.
        collectives: in order of their start.
        threads: names of threads and streams.
        backend: of torch.distributed, where the file says.
    """

    path: Path
    rank: int
    on_device: bool
    work: Table
    annotations: list[Annotation]
    collectives: list[Collective]
    threads: list[str]
    first: int
    last: int
    world_size: int | None = None
    backend: str | None = None
    device_name: str | None = None
    devices: int = 0
    launch_linked: bool = True


def load_trace(path: Path, position: int = 0) -> RankTrace:
    """Read one rank's trace.

    Args:
        position: the rank, where neither the file nor its name says.

    Raises:
        ConfigError: it cannot be read, or is no trace.
    """
    file = TraceFile(path)
    collector = _Collector()
    try:
        for batch in file.batches():
            collector.add(batch)
        return collector.finish(path, file.head, position)
    except UnusableError as error:
        raise file.damaged(str(error)) from error


@attrs.define(eq=False)
class _Columns:
    start: array[int] = attrs.field(factory=lambda: array("q"))
    end: array[int] = attrs.field(factory=lambda: array("q"))
    key: array[int] = attrs.field(factory=lambda: array("q"))
    kind: array[int] = attrs.field(factory=lambda: array("b"))
    thread: array[int] = attrs.field(factory=lambda: array("i"))

    def add(self, start: int, end: int, key: int, kind: int, thread: int) -> None:
        self.start.append(start)
        self.end.append(end)
        self.key.append(key)
        self.kind.append(kind)
        self.thread.append(thread)


@attrs.frozen
class _Communication:
    """A collective whose metadata, or its operator's, is still to be read."""

    name: str
    start: int
    end: int
    correlation: int
    thread: int
    args: Args


class _Collector:
    """Keeps what counts of the events that pass by."""

    def __init__(self) -> None:
        self.device, self.operators = _Columns(), _Columns()
        self.launches: dict[int, int] = {}
        self.launch_threads: dict[int, int] = {}
        self.annotations: list[Annotation] = []
        self.kernels: list[_Communication] = []
        self.gloo: list[_Communication] = []
        self.described: dict[int, Args] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.names: dict[int, str] = {}
        self.first, self.last = 1 << 62, -(1 << 62)
        self.devices: set[Any] = set()

    def add(self, events: Iterable[Event]) -> None:
        """Take in a batch."""
        for event in events:
            if event.ph == "X":
                if event.ts is not None and event.dur is not None and isinstance(event.cat, str):
                    start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
                    if duration >= 0:
                        self._add_range(event, start, duration)
            elif event.ph == "M" and event.name == "thread_name" and event.args is not None:
                self.names[self._thread(event)] = str(event.args.thread_name)

    def _thread(self, event: Event) -> int:
        key = (event.pid, event.tid)
        try:
            return self.threads.setdefault(key, len(self.threads))
        except TypeError:  # a list or an object where a number or a name belongs
            return self.threads.setdefault((str(event.pid), str(event.tid)), len(self.threads))

    def _add_range(self, event: Event, start: int, duration: int) -> None:
        category, end = event.cat, start + duration
        args = event.args or _NO_ARGS
        name = event.name if isinstance(event.name, str) else str(event.name)
        if category in kinds.OPERATOR_CATEGORIES:
            self._see(start, end)
            if name == "record_param_comms":
                if args.external_id is not None:
                    self.described[identifier(args.external_id)] = args
            elif kinds.operator_computes(name):
                self.operators.add(start, end, start, Kind.COMPUTE, self._thread(event))
        elif category in kinds.KERNEL_CATEGORIES or category in kinds.MEMORY_CATEGORIES:
            self._add_device(event, name, args, start, end)
        elif category in kinds.LAUNCH_CATEGORIES:
            if args.correlation is not None:
                correlation = identifier(args.correlation)
                self.launches[correlation] = start
                self.launch_threads[correlation] = self._thread(event)
        elif category in kinds.ANNOTATION_CATEGORIES:
            self._see(start, end)
            thread = self._thread(event)
            if kinds.gloo_operation(name) is not None:
                self.gloo.append(_Communication(name, start, end, -1, thread, args))
            else:
                self.annotations.append(Annotation(name, start, end, thread))

    def _add_device(self, event: Event, name: str, args: Args, start: int, end: int) -> None:
        kind = kinds.device_kind(name, event.cat, args.collective is not None)
        if kind is None:
            return
        if isinstance(args.device, int | str):
            self.devices.add(args.device)
        correlation = -1 if args.correlation is None else identifier(args.correlation)
        thread = self._thread(event)
        self.device.add(start, end, correlation, kind, thread)
        if kind == Kind.COMMUNICATION:
            self.kernels.append(_Communication(name, start, end, correlation, thread, args))

    def _see(self, start: int, end: int) -> None:
        self.first = min(self.first, start)
        self.last = max(self.last, end)

    def finish(self, path: Path, head: dict[str, Any], position: int) -> RankTrace:
        """The trace, once all events were seen."""
        info = head.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        base = head.get("baseTimeNanoseconds")
        base = base if isinstance(base, int) else 0
        least, most = self._extent()
        if not (-TIME_LIMIT_NS <= least + base and most + base <= TIME_LIMIT_NS):
            raise UnusableError(f"its times, {least} to {most} ns after {base} ns, are further than 95 years from 0")
        on_device = len(self.device.start) > 0
        world_size = number_of_ranks(info.get("world_size"))
        unnamed = unnamed_group(info, world_size)
        if on_device:
            work = self._device_table()
            collectives = self._device_collectives(attrs.evolve(unnamed, size=None))
        else:
            work, collectives = self._host_work(unnamed)
        trace = RankTrace(
            path=path,
            rank=_rank(info, path, position),
            on_device=on_device,
            work=work,
            annotations=self.annotations,
            collectives=sorted(collectives, key=lambda c: (c.start, c.end)),
            threads=[self.names.get(i, str(key[1])) for key, i in self.threads.items()],
            first=self.first,
            last=self.last,
            world_size=world_size,
            backend=info["backend"] if isinstance(info.get("backend"), str) else None,
            device_name=_device_name(head),
            devices=len(self.devices),
            launch_linked=not on_device or bool((work.launch >= 0).any()),
        )
        return shifted(trace, base) if base else trace

    def _extent(self) -> tuple[int, int]:
        """The earliest and the latest of all times; 0 is always between them."""
        starts = [self.device.start, self.operators.start, self.launches.values()]
        ends = [self.device.end, self.operators.end, self.launches.values()]
        named: list[Annotation | _Communication] = [*self.annotations, *self.gloo]
        least = min(min(times, default=0) for times in (*starts, [item.start for item in named]))
        most = max(max(times, default=0) for times in (*ends, [item.end for item in named]))
        return min(least, 0), max(most, 0)

    def _device_table(self) -> Table:
        columns, launches = self.device, self.launches
        launch = np.fromiter((launches.get(c, -1) for c in columns.key), dtype=np.int64, count=len(columns.key))
        return _table(columns, launch)

    def _device_collectives(self, unnamed: Unnamed) -> list[Collective]:
        named = _Named([a for a in self.annotations if a.name.startswith("nccl:")])
        out = []
        for kernel in self.kernels:
            launch = self.launches.get(kernel.correlation, -1)
            args = kernel.args
            if args.collective is None and args.external_id is not None:
                args = self.described.get(identifier(args.external_id), args)
            name = args.collective if isinstance(args.collective, str) else None
            name = name or named.at(launch, self.launch_threads.get(kernel.correlation, -1)) or kernel.name
            out.append(_collective(kernel, args, kinds.collective_operation(name), launch, unnamed))
        return out

    def _host_work(self, unnamed: Unnamed) -> tuple[Table, list[Collective]]:
        """CPU operators that compute, those on gloo's own threads left out: they are part of its collectives."""
        table = _table(self.operators, np.array(self.operators.key, dtype=np.int64))
        gloo = np.array(sorted({c.thread for c in self.gloo}), dtype=np.int32)
        work = table.where(~np.isin(table.thread, gloo)) if len(gloo) else table
        collectives = []
        for item in self.gloo:
            operation = kinds.gloo_operation(item.name)
            assert operation is not None
            collectives.append(_collective(item, item.args, operation, item.start, unnamed))
        return work, collectives


class _Named:
    """Which of some annotations stands around a time on a thread; they do not overlap on one thread."""

    def __init__(self, annotations: list[Annotation]) -> None:
        self._by_thread: dict[int, tuple[Int64, list[Annotation]]] = {}
        for thread in {a.thread for a in annotations}:
            own = sorted((a for a in annotations if a.thread == thread), key=lambda a: a.start)
            self._by_thread[thread] = np.array([a.start for a in own], dtype=np.int64), own

    def at(self, time: int, thread: int) -> str | None:
        if thread not in self._by_thread:
            return None
        starts, own = self._by_thread[thread]
        index = int(np.searchsorted(starts, time, side="right")) - 1
        return own[index].name if index >= 0 and time < own[index].end else None


def _collective(item: _Communication, args: Args, operation: str, launch: int, unnamed: Unnamed) -> Collective:
    size = number_of_ranks(args.group_size) or unnamed.size
    types = args.input_type
    dtype = args.dtype if args.dtype is not None else types[0] if isinstance(types, list) and types else None
    group = ":".join(str(part) for part in (args.group_name, args.group_ranks) if part not in (None, ""))
    return Collective(
        operation,
        item.start,
        item.end,
        launch,
        item.thread,
        group or unnamed.label,
        bool(group) or unnamed.known,
        size,
        dtype if isinstance(dtype, str) else None,
        kinds.message_bytes(args, operation, size),
    )


def _table(columns: _Columns, launch: Int64) -> Table:
    return Table(
        np.array(columns.start, dtype=np.int64),
        np.array(columns.end, dtype=np.int64),
        launch,
        np.array(columns.kind, dtype=np.int8),
        np.array(columns.thread, dtype=np.int32),
    )


def shifted(trace: RankTrace, by: int) -> RankTrace:
    """The same trace with every time `by` ns later."""
    work = trace.work
    launch = np.where(work.launch >= 0, work.launch + by, -1)
    return attrs.evolve(
        trace,
        work=Table(work.start + by, work.end + by, launch, work.kind, work.thread),
        annotations=[attrs.evolve(a, start=a.start + by, end=a.end + by) for a in trace.annotations],
        collectives=[
            attrs.evolve(c, start=c.start + by, end=c.end + by, launch=c.launch + by if c.launch >= 0 else -1)
            for c in trace.collectives
        ],
        first=trace.first + by,
        last=trace.last + by,
    )


def _rank(info: dict[str, Any], path: Path, position: int) -> int:
    rank = info.get("rank")
    if isinstance(rank, int):
        return rank
    found = re.search(r"rank[-_]?(\d+)", path.name)
    return int(found[1]) if found else position


def _device_name(head: dict[str, Any]) -> str | None:
    devices = head.get("deviceProperties")
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        name = devices[0].get("name")
        return name if isinstance(name, str) else None
    return None
