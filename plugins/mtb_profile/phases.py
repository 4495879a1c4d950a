"""The phases of a step, as the program has named them, and how much of a rank's own time each took."""

from __future__ import annotations

import re
from functools import cache

import attrs
import numpy as np

from .breakdown import Activity
from .kinds import Kind
from .loading import Annotation, RankTrace
from .spans import Int64, Spans, union
from .windows import Step, View, issue_times

#: Time of a step that no named range covers.
OTHER = "other"

# How programs call the four phases. A name that is none of these is a phase by its own name.
_NAMES = (
    ("data", r"mtb:data|data|data[ _-]?load\w*|dataloader\w*|batch_generation|get_batch|wait_for_batch|copy_batch_to_gpu|enumerate\(DataLoader\).*"),
    ("forward", r"mtb:forward|fwd|forward\w*|DistributedDataParallel\.forward"),
    ("backward", r"mtb:backward|bwd|backward\w*"),
    ("optimizer", r"mtb:optimizer|opt|optim\w*|Optimizer\.(step|zero_grad)#.*|zero_grad|optimizer[ _-]step"),
)  # fmt: skip
_PATTERNS = [(phase, re.compile(pattern, re.IGNORECASE)) for phase, pattern in _NAMES]
# Ranges that libraries open inside the phases, or around whole steps.
_INSIDE = re.compile(
    r"ProfilerStep#|nccl:|gloo:|FSDP::|DistributedDataParallel\.forward|torch/|Torch-|PyTorch Profiler"
)


@cache
def phase_name(annotation: str) -> str:
    """``## forward ##`` -> ``forward``, ``mtb:data`` -> ``data``; another name stays as it is."""
    plain = annotation.strip("# ").strip()
    return next((phase for phase, pattern in _PATTERNS if pattern.fullmatch(plain)), plain)


@attrs.frozen(eq=False)
class Phases:
    """Named ranges on the training thread, outermost ones only, in order of time."""

    starts: Int64
    ends: Int64
    names: list[str]

    def at(self, time: int) -> str:
        """The phase in which `time` lies."""
        index = int(np.searchsorted(self.starts, time, side="right")) - 1
        return self.names[index] if index >= 0 and time < self.ends[index] else OTHER

    def all_at(self, times: Int64) -> list[str]:
        """The phase of each of `times`."""
        index = np.searchsorted(self.starts, times, side="right") - 1
        inside = (index >= 0) & (times < self.ends[np.maximum(index, 0)]) if len(self.ends) else index >= 0
        return [self.names[i] if yes else OTHER for i, yes in zip(index.tolist(), inside.tolist(), strict=True)]


def find_phases(trace: RankTrace, steps: tuple[Step, ...]) -> Phases:
    """The phases of a trace: the outermost ranges inside its steps on the thread that takes them.

    A library's own ranges count only where the program has named nothing around them.
    """
    thread = _training_thread(trace, steps)
    spans = union([s.start for s in steps], [s.end for s in steps])
    own = [
        a
        for a in trace.annotations
        if a.thread == thread
        and a.name != "mtb:step"
        and not a.name.startswith("ProfilerStep#")
        and (not steps or spans.contains(np.array([a.start]))[0])
    ]
    named = [a for a in own if not _INSIDE.match(a.name)]
    chosen = _outermost(named)
    if not any(phase_name(a.name) == "forward" for a in chosen):
        chosen = _outermost([*named, *(a for a in own if a.name == "DistributedDataParallel.forward")])
    return Phases(
        np.array([a.start for a in chosen], dtype=np.int64),
        np.array([a.end for a in chosen], dtype=np.int64),
        [phase_name(a.name) for a in chosen],
    )


def _training_thread(trace: RankTrace, steps: tuple[Step, ...]) -> int | None:
    """The thread whose ranges mark the steps; without marks, the one with the most named time."""
    for annotation in trace.annotations:
        if any((annotation.start, annotation.end) == (s.start, s.end) for s in steps):
            return annotation.thread
    lengths: dict[int, int] = {}
    for annotation in trace.annotations:
        lengths[annotation.thread] = lengths.get(annotation.thread, 0) + annotation.end - annotation.start
    return max(lengths, key=lambda t: lengths[t]) if lengths else None


def _outermost(annotations: list[Annotation]) -> list[Annotation]:
    out: list[Annotation] = []
    for annotation in sorted(annotations, key=lambda a: (a.start, -a.end)):
        if not out or annotation.start >= out[-1].end:
            out.append(annotation)
    return out


def own_time(view: View, step: Step, done: Activity, phases: Phases) -> dict[str, int]:
    """How long a rank needed for a step by itself, by phase, ns: all of its time but that in exposed communication.

    Time in exposed communication is spent on the other ranks or on the network, so it tells nothing about this rank.
    Of a host trace a phase is where the training thread is. Of a device trace it is the phase from which work was
    launched, and the time a device idles before some work counts for that work's phase.
    """
    if view.trace.on_device:
        return _own_on_device(view, step, done.exposed, phases)
    return _own_on_host(step, done.exposed, phases)


def _own_on_host(step: Step, exposed: Spans, phases: Phases) -> dict[str, int]:
    starts = np.maximum(phases.starts, step.start)
    ends = np.minimum(phases.ends, step.end)
    inside = ends > starts
    starts, ends = starts[inside], ends[inside]
    names = [name for name, yes in zip(phases.names, inside.tolist(), strict=True) if yes]
    lengths = ends - starts - exposed.within(starts, ends)
    out: dict[str, int] = {}
    for name, length in zip(names, lengths.tolist(), strict=True):
        out[name] = out.get(name, 0) + length
    edges = np.array([step.start, step.end], dtype=np.int64)
    whole = step.end - step.start - int(exposed.within(edges[:1], edges[1:])[0])
    out[OTHER] = whole - sum(out.values())
    return out


def _own_on_device(view: View, step: Step, exposed: Spans, phases: Phases) -> dict[str, int]:
    issued = issue_times(view.trace, view.work)
    mine = (issued >= step.start) & (issued < step.end)
    work = view.work.where(mine & (view.work.kind != Kind.COMMUNICATION))
    if not len(work):
        return {OTHER: 0}
    order = np.argsort(work.start, kind="stable")
    start, end = work.start[order], np.maximum.accumulate(work.end[order])
    before = _device_end_before(view, step, int(start[0]))
    reached = np.concatenate([np.array([before], dtype=np.int64), end[:-1]])
    gap = np.maximum(start - reached, 0)
    own = end - reached - np.where(gap > 0, exposed_between(exposed, reached, start), 0)
    names = phases.all_at(issue_times(view.trace, work)[order])
    out: dict[str, int] = {}
    for name, length in zip(names, own.tolist(), strict=True):
        out[name] = out.get(name, 0) + length
    return out


def exposed_between(exposed: Spans, starts: Int64, ends: Int64) -> Int64:
    """Exposed communication between `starts` and `ends`, where these are in that order."""
    return exposed.within(starts, np.maximum(starts, ends))


def _device_end_before(view: View, step: Step, first: int) -> int:
    """When the device had finished the step before; the step's own first start where that is not known."""
    issued = issue_times(view.trace, view.trace.work)
    earlier = view.trace.work.end[(issued >= 0) & (issued < step.start) & (view.trace.work.end <= first)]
    return int(earlier.max()) if len(earlier) else first
