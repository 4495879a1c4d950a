"""The entry of every rank of ``mtb comm``: checks each point, warms it up, times it, and makes a row of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from mtb_core import RankContext, Worker, gather_objects, same_on_all
from mtb_evidence import Sample, environment, gather_uses

from .calls import Group, Prepared, check, clear, prepare
from .kept import Kept
from .points import CommRequest, Point, group_ranks, plan_points
from .rows import Measured, row_of, skipped_row
from .timing import iteration_times, next_loop, timed_loop

#: How torch and the backends say that they lack something; they all say it before anything is sent.
_LACKING = (
    "not support",
    "unsupported",
    "invalid scalar type",
    "cannot use reduceop",
    "not implemented",
    "can't be cast",
)

Tamper = Callable[[Point, Group, torch.Tensor], None]


@attrs.frozen
class Work:
    """Input of a rank.

    Attributes:
        journal: file to which rank 0 appends finished rows, one a line, so that they outlive it; None: none is kept.
        tamper: changes results before they are checked; for tests of the check.
    """

    request: CommRequest
    journal: Path | None = None
    tamper: Tamper | None = None


@attrs.frozen
class Stopped(Exception):
    """All ranks have agreed to stop; the point at hand is given up."""

    reason: str


def measure(work: Work, ctx: RankContext, worker: Worker) -> dict[str, Any]:
    """All points, on every rank; called by all ranks.

    Returns:
        ``{"head": …, "rows": […], "stopped": signal or None, "uses": what `mtb_evidence.gather_uses` gives}``.
    """
    start = Sample.take()
    request = work.request
    same_on_all(ctx, "what to measure", attrs.asdict(request))
    assert ctx.backend is not None
    points = plan_points(request, ctx.world_size, ctx.backend)
    journal = Kept(work.journal if ctx.rank == 0 else None, worker.progress)
    head = {
        "world_size": ctx.world_size,
        "backend": ctx.backend,
        "device": ctx.device.partition(":")[0],
        "groups": ctx.world_size // group_ranks(request, ctx.world_size),
        "environment": environment(ctx.device),
    }
    journal.write(head)
    rows: list[dict[str, Any]] = []
    stopped = None
    progress = worker.progress if ctx.rank == 0 else _say_nothing
    with _groups(request, ctx) as group:
        for index, point in enumerate(points):
            try:
                row = _row(point, group, work, ctx, worker)
            except Stopped as stop:
                stopped = stop.reason
                break
            rows.append(row)
            journal.write(row)
            progress({"event": "row", "index": index, "count": len(points), "text": _said(point, row)})
    return {"head": head, "rows": rows, "stopped": stopped, "uses": gather_uses(ctx, start)}


def _say_nothing(_fields: dict[str, Any]) -> None:
    """Of all ranks only the first reports."""


@contextmanager
def _groups(request: CommRequest, ctx: RankContext) -> Iterator[Group]:
    """This rank's group; its handle is destroyed with all others by whoever opened the ranks."""
    size = group_ranks(request, ctx.world_size)
    assert dist.group.WORLD is not None
    assert ctx.backend is not None
    handle = dist.group.WORLD
    first = ctx.rank - ctx.rank % size
    if size < ctx.world_size:
        # Everybody makes every group, in the same order, as torch wants it.
        for start in range(0, ctx.world_size, size):
            made = dist.new_group(list(range(start, start + size)))
            if start == first:
                handle = made
    yield Group(handle, ctx.rank - first, tuple(range(first, first + size)), ctx.backend, ctx.device)


def _row(point: Point, group: Group, work: Work, ctx: RankContext, worker: Worker) -> dict[str, Any]:
    if point.reason is not None:
        return skipped_row(point, point.reason)
    request = work.request
    prepared = prepare(point, group)
    wrong, lacking = _checked(prepared, point, group, work)
    results = gather_objects(ctx, (wrong, lacking, worker.stop.requested))
    _stop_together(stop for _, _, stop in results)
    reason = next((text for _, text, _ in results if text is not None), None)
    if reason is not None:
        return skipped_row(point, f"{ctx.backend} refused it: {reason}")
    clear(prepared)
    seconds = timed(prepared, request, ctx, worker)
    total = sum(count for count, _, _ in results) if request.check else None
    return row_of(point, Measured(seconds, total, group.backend))


def timed(prepared: Prepared, request: CommRequest, ctx: RankContext, worker: Worker) -> list[float]:
    """Warm up, then time; seconds of each iteration, the same on all ranks. Called by all ranks.

    Raises:
        Stopped: on all ranks, before a loop, where one of them was asked to stop.
    """
    times = _loops(prepared, request.warmup, None, 0.0, ctx, worker)
    # The first one may set up connections; without any, nothing is known.
    known = times[1:] or times
    estimate = sorted(known)[len(known) // 2] if known else 0.0
    return _loops(prepared, request.iterations, request.seconds, estimate, ctx, worker)


def _loops(
    prepared: Prepared, iterations: int, wanted_s: float | None, estimate_s: float, ctx: RankContext, worker: Worker
) -> list[float]:
    seconds: list[float] = []
    while count := next_loop(seconds, iterations, wanted_s, estimate_s):
        _stop_together(gather_objects(ctx, worker.stop.requested))
        _together(ctx)
        ends = timed_loop(prepared.call, count, ctx.device)
        seconds += iteration_times(gather_objects(ctx, ends))
    return seconds


def _checked(prepared: Prepared, point: Point, group: Group, work: Work) -> tuple[int, str | None]:
    """(elements that are wrong on this rank, why the backend does not do this at all)."""
    tamper = work.tamper
    change = None if tamper is None else lambda outputs: tamper(point, group, outputs)
    try:
        if work.request.check:
            return check(prepared, change), None
        clear(prepared)
    except (RuntimeError, TypeError, ValueError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not any(phrase in text.lower() for phrase in _LACKING):
            raise
        return 0, text
    return 0, None


def _together(ctx: RankContext) -> None:
    dist.barrier()
    if ctx.device.startswith("cuda"):
        torch.cuda.synchronize()


def _stop_together(requests: Iterable[str | None]) -> None:
    asked = next((name for name in requests if name is not None), None)
    if asked is not None:
        raise Stopped(asked)


def _said(point: Point, row: dict[str, Any]) -> str:
    if row["status"] == "skipped":
        return f"{point}: skipped, {row['reason']}"
    busbw = row["busbw_gb_per_sec"]
    rate = "" if busbw is None else f", busbw {busbw:.3g} GB/s"
    wrong = f", {row['wrong']} elements WRONG" if row["wrong"] else ""
    return f"{point}: {row['time_ms']['mean']:.4g} ms{rate}{wrong}"
