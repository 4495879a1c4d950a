"""Which part of a trace is looked at, and where its steps are."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from .loading import Annotation, RankTrace, Table
from .spans import Spans, union

Window = Literal["trace", "steps", "steps-but-last"]
WINDOWS: tuple[Window, ...] = ("trace", "steps", "steps-but-last")

_MARK = re.compile(r"ProfilerStep#(\d+)$")
_OPTIMIZER = re.compile(r"Optimizer\.step#")


@attrs.frozen
class Step:
    """One step on the host's clock, ns. `number` is the profiler's, or counted from 0 where steps were inferred."""

    number: int
    start: int
    end: int


@attrs.frozen
class Steps:
    """The steps of a trace.

    Attributes:
        source: ``"ProfilerStep"`` (marked by torch.profiler), ``"Optimizer.step"`` (a step ends where the optimizer's
            range does), or None where there are none.
    """

    steps: tuple[Step, ...] = ()
    source: str | None = None

    @property
    def spans(self) -> Spans:
        """All of them as a set of times."""
        return union([s.start for s in self.steps], [s.end for s in self.steps])


def find_steps(trace: RankTrace) -> Steps:
    """The steps that the profiler has marked; without marks, from one end of ``Optimizer.step`` to the next."""
    marks = []
    for annotation in trace.annotations:
        found = _MARK.match(annotation.name)
        if found:
            marks.append(Step(int(found[1]), annotation.start, annotation.end))
    if marks:
        return Steps(tuple(sorted(marks, key=lambda s: s.start)), "ProfilerStep")
    return _inferred(trace)


def _inferred(trace: RankTrace) -> Steps:
    ranges = [a for a in trace.annotations if _OPTIMIZER.match(a.name)]
    if len(ranges) < 2:
        return Steps()
    last: Annotation = max(ranges, key=lambda a: a.end)
    ends = sorted(a.end for a in ranges if a.name == last.name and a.thread == last.thread)
    if len(ends) < 2:
        return Steps()
    # What stands before the first end is part of a step of which nobody knows how much is missing.
    return Steps(tuple(Step(i, a, b) for i, (a, b) in enumerate(pairwise(ends))), "Optimizer.step")


@attrs.frozen(eq=False)
class View:
    """A trace seen through a window.

    Attributes:
        window: the one in force; ``"trace"`` where steps were asked for and there are none.
        steps: those inside the window.
        work: the events inside; of the host's, also those that reach over its edges (`limits` cuts them).
        limits: of a host trace, the times that count; None: from the first event to the last.
    """

    trace: RankTrace
    window: Window
    steps: Steps
    work: Table
    limits: Spans | None

    def has(self, start: int, launch: int) -> bool:
        """Whether something that was issued at `launch` (-1: unknown) and began at `start` belongs to the window."""
        if self.window == "trace":
            return True
        issued = launch if self.trace.on_device and self.trace.launch_linked else start
        return any(s.start <= issued < s.end for s in self.steps.steps)

    def step_of(self, start: int, launch: int) -> int | None:
        """Number of the step in which it was issued."""
        issued = launch if self.trace.on_device and self.trace.launch_linked else start
        return next((s.number for s in self.steps.steps if s.start <= issued < s.end), None)

    def issued(self) -> NDArray[np.int64]:
        """When each event of `work` was issued: by the host's launch where the trace links it, else its start."""
        return issue_times(self.trace, self.work)


def issue_times(trace: RankTrace, work: Table) -> NDArray[np.int64]:
    """When each event was issued; -1 for device work that no launch is known of, in a trace that links the others."""
    return work.launch if trace.on_device and trace.launch_linked else work.start


def look(trace: RankTrace, window: Window | None) -> View:
    """`trace` through `window`; None: its steps where it has any, otherwise all of it.

    ``steps`` holds what was issued inside a step: device work by its launch, host work by the clock.
    ``steps-but-last`` leaves the last step out, whose device work the profiler may have cut off.
    """
    steps = find_steps(trace)
    wanted: Window = window or "steps"
    if wanted == "steps-but-last" and len(steps.steps) < 2:
        wanted = "steps"
    if wanted != "trace" and not steps.steps:
        wanted = "trace"
    if wanted == "trace":
        return View(trace, "trace", steps, trace.work, None)
    if wanted == "steps-but-last":
        steps = attrs.evolve(steps, steps=steps.steps[:-1])
    spans = steps.spans
    if trace.on_device:
        return View(trace, wanted, steps, trace.work.where(spans.contains(issue_times(trace, trace.work))), None)
    inside = spans.within(trace.work.start, trace.work.end) > 0
    return View(trace, wanted, steps, trace.work.where(inside), spans)
