"""The analysis of one or many ranks' traces: everything that is reported, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import attrs
import numpy as np

from mtb_core import ConfigError

from . import kinds
from .across import Arrivals, Matched, Matching, align_clocks, arrivals, match
from .breakdown import Activity, Times, activity, step_activity
from .loading import Collective, RankTrace, load_trace
from .phases import OTHER, Phases, find_phases, own_time
from .spans import Spans, union
from .stragglers import Straggler, find_stragglers
from .windows import View, Window, issue_times, look


@attrs.frozen
class CollectiveRow:
    """The collectives of one kind, group and dtype on one rank; times in ns.

    Attributes:
        message_bytes: sum of S; None where a size is unknown.
        transfer: the part of `time` after the last rank had come; None where not all of them were matched.
    """

    operation: str
    group: str
    group_size: int | None
    dtype: str | None
    count: int
    message_bytes: int | None
    time: int
    transfer: int | None

    @property
    def algbw(self) -> float | None:
        """S over time, 10^9 bytes a second; over the transfer alone where it is known."""
        time = self.time if self.transfer is None else self.transfer
        return self.message_bytes / time if self.message_bytes and time > 0 else None

    @property
    def busbw(self) -> float | None:
        """`algbw` times nccl-tests' factor of the operation."""
        factor = kinds.bus_factor(self.operation, self.group_size)
        return None if self.algbw is None or factor is None else self.algbw * factor


@attrs.frozen
class Parts:
    """Disjoint parts of a rank's time, ns, that sum to it.

    Attributes:
        transfer: exposed communication, without waiting.
        waiting: exposed communication while another rank had not come.
        data: idle in the data phase.
        host: idle otherwise.
    """

    compute: int
    transfer: int
    waiting: int
    memory: int
    data: int
    host: int

    @property
    def total(self) -> int:
        """All of the time."""
        return sum(attrs.astuple(self))


@attrs.frozen(eq=False)
class RankAnalysis:
    """One rank, seen through the window; times in ns.

    Attributes:
        steps: by the step's number.
        parts: of the window.
        step_parts: by the step's number; of a device, a step lasts from the end of the one before to its own.
        own: own time by phase, by step: see `mtb_profile.phases.own_time`.
        idle_by_phase: sums to ``times.idle``.
        waiting: exposed communication in which the rank waited for others to come.
        point_to_point: further exposed communication in sends and receives.
    """

    view: View
    times: Times
    steps: dict[int, Times]
    parts: Parts
    step_parts: dict[int, Parts]
    own: dict[int, dict[str, int]]
    idle_by_phase: dict[str, int]
    forward_compute: int
    collectives: list[CollectiveRow]
    waiting: int
    point_to_point: int
    phases: Phases

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.view.trace.rank


@attrs.frozen(eq=False)
class Analysis:
    """All ranks together.

    Attributes:
        suspects: ranks that would be stragglers if chance did not explain it as well.
        shifts: by how much clocks were moved to agree, ns, by rank.
        notes: what a reader must know to judge the figures.
    """

    ranks: list[RankAnalysis]
    matching: Matching
    arrivals: list[Arrivals]
    stragglers: list[Straggler]
    suspects: list[Straggler]
    shifts: dict[int, int]
    notes: list[str]

    @property
    def world_size(self) -> int | None:
        """Ranks of the job, where the traces say; there may be traces of some of them only."""
        sizes = [r.view.trace.world_size for r in self.ranks if r.view.trace.world_size is not None]
        return max(sizes) if sizes else None

    @property
    def waiting_is_known(self) -> bool:
        """Whether waiting for other ranks can be told from transfer: their traces are needed, where there are others."""
        return len(self.ranks) > 1 or self.world_size == 1 or not any(r.times.exposed for r in self.ranks)

    @property
    def step_times(self) -> dict[int, float]:
        """Length of each step, ns: the mean over ranks, from one step's beginning to its end on the host."""
        lengths: dict[int, list[int]] = {}
        for rank in self.ranks:
            for step in rank.view.steps.steps:
                lengths.setdefault(step.number, []).append(step.end - step.start)
        return {number: fmean(values) for number, values in sorted(lengths.items())}


def analyze(paths: Sequence[Path], window: Window | None = None) -> Analysis:
    """Analyse one trace a rank.

    Args:
        window: None: the steps where there are any, else the whole trace.

    Raises:
        ConfigError: a file cannot be read, two are of the same rank, or nothing in one of them counts as work.
    """
    traces = sorted((load_trace(path, i) for i, path in enumerate(paths)), key=lambda t: t.rank)
    _check(traces)
    views, shifts = align_clocks([look(trace, window) for trace in traces])
    matching = match(views)
    phases = {v.trace.rank: find_phases(v.trace, v.steps.steps) for v in views}
    ranks = [_rank(view, matching, phases[view.trace.rank]) for view in views]
    slow = find_stragglers(
        {r.rank: _comparable(r) for r in ranks},
        {r.rank: {n: t.compute for n, t in r.steps.items()} for r in ranks},
        {r.rank: {s.number: s.end - s.start for s in r.view.steps.steps} for r in ranks},
    )
    return Analysis(
        ranks,
        matching,
        arrivals(views, matching, phases),
        [s for s in slow if s.certain],
        [s for s in slow if not s.certain],
        shifts,
        _notes(views, window, matching, shifts),
    )


def _check(traces: Sequence[RankTrace]) -> None:
    seen: dict[int, RankTrace] = {}
    for trace in traces:
        if not len(trace.work) and not trace.collectives:
            raise ConfigError(
                f"The trace {trace.path} holds neither kernels nor CPU operators, so there is nothing to analyse; record it "
                "with ProfilerActivity.CPU, or CUDA on a GPU, over at least one step."
            )
        if trace.rank in seen:
            raise ConfigError(
                f"{seen[trace.rank].path} and {trace.path} are both traces of rank {trace.rank}; analyse one trace of each "
                "rank at a time."
            )
        seen[trace.rank] = trace


def _rank(view: View, matching: Matching, phases: Phases) -> RankAnalysis:
    done = activity(view)
    rank = view.trace.rank
    mine = [m for m in matching.matched if rank in m.members]
    exposed = done.exposed
    waiting = exposed & union([m.members[rank].start for m in mine], [_until(m, rank) for m in mine])
    idle, in_data = _idle_by_phase(view, done, phases)
    part_of = _divide(done, waiting, in_data)
    p2p = [c for c in view.trace.collectives if c.operation in kinds.POINT_TO_POINT]
    in_p2p = (exposed & union([c.start for c in p2p], [c.end for c in p2p])) - waiting
    steps = {s.number: step_activity(view, s) for s in view.steps.steps}
    return RankAnalysis(
        view=view,
        times=done.times(),
        steps={number: each.times() for number, each in steps.items()},
        parts=part_of(done.span),
        step_parts={number: part_of(span) for number, span in _step_spans(view, done).items()},
        own={s.number: own_time(view, s, steps[s.number], phases) for s in view.steps.steps},
        idle_by_phase=idle,
        forward_compute=_forward_compute(view, done, phases),
        collectives=_rows(view, mine),
        waiting=waiting.total,
        point_to_point=in_p2p.total,
        phases=phases,
    )


def _comparable(rank: RankAnalysis) -> dict[int, dict[str, int]]:
    """Own time of the steps of which all is known: how long a device idled before its first one no trace tells."""
    first = 1 if rank.view.trace.on_device and len(rank.own) > 1 else 0
    return dict(sorted(rank.own.items())[first:])


def _until(matched: Matched, rank: int) -> int:
    own = matched.members[rank]
    return own.start + matched.waiting(rank)


def _idle_by_phase(view: View, done: Activity, phases: Phases) -> tuple[dict[str, int], Spans]:
    """How long it idled by the phase that should have given work, and when it did in the data phase.

    Of a device, idling is the phase's whose work came next.
    """
    out: dict[str, int] = {}
    if view.trace.on_device:
        work = view.work
        order = np.argsort(work.start, kind="stable")
        start, end = work.start[order], np.maximum.accumulate(work.end[order])
        late = np.flatnonzero(start[1:] > end[:-1])
        starts, ends = end[:-1][late], start[1:][late]
        names = phases.all_at(issue_times(view.trace, work)[order][1:][late])
        for name, length in zip(names, (ends - starts).tolist(), strict=True):
            out[name] = out.get(name, 0) + length
        data = [i for i, name in enumerate(names) if name == "data"]
        return out, union(starts[data], ends[data])
    idle = done.span - (done.compute | done.communication)
    for name, length in zip(phases.names, idle.within(phases.starts, phases.ends).tolist(), strict=True):
        out[name] = out.get(name, 0) + length
    out[OTHER] = out.get(OTHER, 0) + idle.total - sum(out.values())
    data = [i for i, name in enumerate(phases.names) if name == "data"]
    in_data = idle & union(phases.starts[data], phases.ends[data])
    return {name: length for name, length in out.items() if length}, in_data


def _divide(done: Activity, waiting: Spans, data: Spans) -> Callable[[Spans], Parts]:
    """What gives the parts of any times within the window."""
    transfer = done.exposed - waiting
    busy = done.compute | done.communication
    memory = done.memory - busy
    host = done.span - (busy | memory | data)
    sets = (done.compute, transfer, waiting, memory, data, host)
    return lambda span: Parts(*(int(part.within(span.starts, span.ends).sum()) for part in sets))


def _step_spans(view: View, done: Activity) -> dict[int, Spans]:
    """The times of each step, by its number, without those in which nothing is.

    Of a device a step ends with the last of its work, and begins where the one before ended.
    """
    if not view.trace.on_device:
        return {s.number: union([s.start], [s.end]) for s in view.steps.steps}
    issued = issue_times(view.trace, view.work)
    reached = int(done.span.starts[0]) if len(done.span.starts) else 0
    out = {}
    for step in view.steps.steps:
        ends = view.work.end[(issued >= step.start) & (issued < step.end)]
        if len(ends) and int(ends.max()) > reached:
            out[step.number] = union([reached], [int(ends.max())])
            reached = int(ends.max())
    return out


def _forward_compute(view: View, done: Activity, phases: Phases) -> int:
    """How long the forward phase computes."""
    if view.trace.on_device:
        issued = phases.all_at(issue_times(view.trace, view.work))
        mask = np.array([name == "forward" for name in issued], dtype=bool) & (view.work.kind == kinds.Kind.COMPUTE)
        return union(view.work.start[mask], view.work.end[mask]).total
    forward = [i for i, name in enumerate(phases.names) if name == "forward"]
    within: Spans = union(phases.starts[forward], phases.ends[forward]) & done.compute
    return within.total


def _rows(view: View, mine: Sequence[Matched]) -> list[CollectiveRow]:
    rank = view.trace.rank
    transfers = {(m.members[rank].start, m.members[rank].thread): m.transfer(rank) for m in mine}
    groups: dict[tuple[str, str, int | None, str | None], list[Collective]] = {}
    for c in view.trace.collectives:
        if view.has(c.start, c.launch):
            groups.setdefault((c.operation, c.group, c.group_size, c.dtype), []).append(c)
    rows = []
    for (operation, group, size, dtype), members in sorted(groups.items(), key=lambda item: str(item[0])):
        sizes = [c.message_bytes for c in members if c.message_bytes is not None]
        parts = [transfers.get((c.start, c.thread)) for c in members]
        known = [p for p in parts if p is not None]
        rows.append(
            CollectiveRow(
                operation,
                group,
                size,
                dtype,
                len(members),
                sum(sizes) if len(sizes) == len(members) else None,
                sum(c.end - c.start for c in members),
                sum(known) if len(known) == len(members) else None,
            )
        )
    return rows


def _notes(views: Sequence[View], window: Window | None, matching: Matching, shifts: dict[int, int]) -> list[str]:
    notes = []
    for view in views:
        rank, trace = view.trace.rank, view.trace
        if window not in (None, view.window):
            notes.append(
                f"Rank {rank}: --window {window} was asked for, but its trace has too few steps; this is window {view.window}."
            )
        elif view.steps.source is None:
            notes.append(f"Rank {rank}: the trace marks no steps, so the window is the whole trace.")
        if view.steps.source == "Optimizer.step":
            notes.append(
                f"Rank {rank}: the trace has no ProfilerStep marks; a step is taken to end where Optimizer.step does."
            )
        if trace.devices > 1:
            notes.append(
                f"Rank {rank}: its trace holds {trace.devices} devices; they are looked at as one, so work of one hides idling of another."
            )
        if trace.on_device and not trace.launch_linked:
            notes.append(
                f"Rank {rank}: kernels are not linked to their launches; steps are those in which kernels ran, not were launched."
            )
    if len({v.trace.on_device for v in views}) > 1:
        notes.append("Some ranks' traces are of a device and some of a CPU; they are not alike.")
    for reason, count in matching.unmatched.items():
        if len(views) > 1:
            notes.append(f"{count} collectives could not be matched between ranks: {reason}.")
    notes += [f"Rank {r}: its clock was moved by {s / 1e3:.1f} us to agree with the others." for r, s in shifts.items()]
    return notes
