"""Small traces for tests: events in whole or fractional microseconds, written as Kineto writes them."""

from __future__ import annotations

import gzip
import itertools
import json


class Trace:
    """A trace in the making; times in µs."""

    def __init__(self, rank=0, world_size=2, **head):
        self.head = {"distributedInfo": {"rank": rank, "world_size": world_size, "backend": "nccl"}, **head}
        self.events = []
        self._ids = itertools.count(1)

    def event(self, name, cat, ts, dur, pid=1, tid=1, **args):
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )
        return self

    def op(self, name, ts, dur, tid=1, **args):
        return self.event(name, "cpu_op", ts, dur, tid=tid, **args)

    def mark(self, name, ts, dur, tid=1, **args):
        return self.event(name, "user_annotation", ts, dur, tid=tid, **args)

    def step(self, number, ts, dur):
        return self.mark(f"ProfilerStep#{number}", ts, dur)

    def gloo(self, operation, ts, dur, elements=1000, tid=9):
        args = {"Input Dims": [[elements]], "Input type": ["float"]}
        return self.mark(f"gloo:{operation}", ts, dur, tid=tid, **args)

    def kernel(self, name, ts, dur, launch=None, stream=7, cat="kernel", **args):
        """A kernel, launched at `launch`."""
        number = next(self._ids)
        if launch is not None:
            self.event("cudaLaunchKernel", "cuda_runtime", launch, 1, correlation=number)
        return self.event(name, cat, ts, dur, pid=0, tid=stream, device=0, stream=stream, correlation=number, **args)

    def nccl(self, operation, ts, dur, launch=None, elements=1000, group="0", ranks="[0, 1]", size=2, stream=20):
        args = {
            "Collective name": operation, "In msg nelems": elements, "Out msg nelems": elements, "Group size": size,
            "dtype": "Float", "Process Group Name": group, "Process Group Ranks": ranks,
        }  # fmt: skip
        return self.kernel("ncclDevKernel_Generic(...)", ts, dur, launch, stream, **args)

    def content(self):
        return {"schemaVersion": 1, **self.head, "traceEvents": self.events, "traceName": "x.json"}

    def write(self, path):
        data = json.dumps(self.content(), indent=1).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def host_step(trace, number, begin, *, sleep=0.0, phase="forward", late=0.0):
    """One step of 100 µs of a CPU trace: data 10, forward 30, backward 40 and an all_reduce, optimizer 10.

    `sleep` is added to `phase`; `late` is how much later another rank comes, so how long this one waits.
    """
    parts, at = {"data": 10.0, "forward": 30.0, "backward": 40.0, "optimizer": 10.0}, begin
    for name, length in parts.items():
        extra = sleep if name == phase else 0.0
        if name == "optimizer":
            trace.gloo("all_reduce", at, 10.0 + late)
            at += 10.0 + late
        trace.mark(f"mtb:{name}", at, length + extra)
        if name != "data":
            trace.op("aten::mm", at + extra, length)
        at += length + extra
    trace.step(number, begin, at - begin)
    return at
