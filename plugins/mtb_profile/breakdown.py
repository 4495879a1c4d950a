"""Where the time of a rank goes: parts that are disjoint and sum to the span, exactly, in nanoseconds."""

from __future__ import annotations

import attrs
import numpy as np

from .kinds import Kind
from .loading import Collective, Table
from .spans import EMPTY, Spans, union
from .windows import Step, View, issue_times


@attrs.frozen
class Times:
    """Nanoseconds. ``compute + exposed + memory + idle == span``.

    Attributes:
        span: from the first start to the last end of what counts; of a host's steps, their length.
        compute: union of the work that is neither communication nor copying.
        communication: union of the collectives.
        overlapped: communication while something computes.
        exposed: communication while nothing computes.
        memory: copies and fills while nothing computes or communicates.
        memory_total: all copies and fills, hidden or not.
        idle: the rest.
    """

    span: int
    compute: int
    communication: int
    overlapped: int
    exposed: int
    memory: int
    memory_total: int
    idle: int


@attrs.frozen(eq=False)
class Activity:
    """The sets of time behind `Times`."""

    span: Spans
    compute: Spans
    communication: Spans
    memory: Spans

    @property
    def exposed(self) -> Spans:
        """Communication that nothing hides."""
        return self.communication - self.compute

    def times(self) -> Times:
        """Their lengths."""
        computed, communicated = self.compute, self.communication
        overlapped = (computed & communicated).total
        busy = computed | communicated
        every = busy | self.memory
        return Times(
            span=self.span.total,
            compute=computed.total,
            communication=communicated.total,
            overlapped=overlapped,
            exposed=communicated.total - overlapped,
            memory=every.total - busy.total,
            memory_total=self.memory.total,
            idle=self.span.total - every.total,
        )


def activity(view: View) -> Activity:
    """What a rank does in the window."""
    collectives = [c for c in view.trace.collectives if view.has(c.start, c.launch)]
    if view.trace.on_device:
        return _on_device(view.work)
    limits = view.limits
    if limits is None:
        limits = union([view.trace.first], [view.trace.last])
        collectives = view.trace.collectives
    else:
        collectives = [c for c in view.trace.collectives if _touches(limits, c)]
    return _on_host(view.work, collectives, limits)


def step_activity(view: View, step: Step) -> Activity:
    """The same for one step of the window."""
    if view.trace.on_device:
        issued = issue_times(view.trace, view.work)
        return _on_device(view.work.where((issued >= step.start) & (issued < step.end)))
    limits = union([step.start], [step.end])
    inside = limits.within(view.work.start, view.work.end) > 0
    return _on_host(view.work.where(inside), [c for c in view.trace.collectives if _touches(limits, c)], limits)


def _touches(limits: Spans, collective: Collective) -> bool:
    edges = np.array([collective.start, collective.end], dtype=np.int64)
    return int(limits.within(edges[:1], edges[1:])[0]) > 0


def _on_device(work: Table) -> Activity:
    if not len(work):
        return Activity(EMPTY, EMPTY, EMPTY, EMPTY)
    span = union([int(work.start.min())], [int(work.end.max())])
    sets = {kind: union(work.start[work.kind == kind], work.end[work.kind == kind]) for kind in Kind}
    return Activity(span, sets[Kind.COMPUTE], sets[Kind.COMMUNICATION], sets[Kind.MEMORY])


def _on_host(work: Table, collectives: list[Collective], limits: Spans) -> Activity:
    computed = union(work.start, work.end) & limits
    communicated = union([c.start for c in collectives], [c.end for c in collectives]) & limits
    return Activity(limits, computed, communicated, EMPTY)
