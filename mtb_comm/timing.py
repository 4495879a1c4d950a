"""The timed loop, and how iterations are timed over all ranks.

Iterations run back to back, as in nccl-tests and in a training step; only the clock is read between them. An
iteration has ended when the last rank has finished it. Its time runs from the end of the one before; that of the first
one from the barrier that all ranks leave. So a slow rank shows wherever it is slow. The mean is exactly that of
nccl-tests: the loop's time on the slowest rank, divided by the number of iterations. The mean of each iteration's
slowest single call would be larger: ranks that wait in turn would all be counted.

Clock: ``time.perf_counter`` around calls that return when this rank is done, on CPU; events on the device's stream,
read after the loop, on CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from mtb_core import percentile

from .points import MAX_ITERATIONS

#: Ranks look whether they are to stop after loops of about this length.
LOOP_S = 2.0

_MAX_LOOP = 100_000


def timed_loop(call: Callable[[], object], count: int, device: str) -> list[float]:
    """Call `count` times; for each call the seconds from the start of the loop until this rank had finished it."""
    return _on_device(call, count) if device.startswith("cuda") else _on_cpu(call, count)


def _on_cpu(call: Callable[[], object], count: int) -> list[float]:
    clock, ends = time.perf_counter, [0.0] * count
    start = clock()
    for index in range(count):
        call()
        ends[index] = clock()
    return [end - start for end in ends]


def _on_device(call: Callable[[], object], count: int) -> list[float]:
    start, *ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    start.record()
    for end in ends:
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for end in ends]


def iteration_times(ends: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each iteration, from every rank's list of ends (seconds since its own start of the loop)."""
    finished = [max(column) for column in zip(*ends, strict=True)]
    return [after - before for before, after in zip([0.0, *finished], finished, strict=False)]


def time_statistics(seconds: Sequence[float]) -> dict[str, float]:
    """The row's ``time_ms``."""
    ms = [1e3 * s for s in seconds]
    percentiles = {f"p{q}": percentile(ms, q) for q in (50, 95, 99)}
    return {"mean": sum(ms) / len(ms), "min": min(ms), **percentiles, "max": max(ms)}


def next_loop(done_s: Sequence[float], iterations: int, wanted_s: float | None, estimate_s: float) -> int:
    """Number of iterations to run next, in a loop of about `LOOP_S`; 0: enough are done.

    Args:
        done_s: seconds of the iterations so far.
        iterations: number of iterations in all; not used if `wanted_s` is given.
        wanted_s: seconds that all iterations take together, with at most `MAX_ITERATIONS` of them.
        estimate_s: of one iteration, before there are any; 0: nothing is known, so one alone comes first.
    """
    if not done_s and not estimate_s:
        return min(iterations, 1) if wanted_s is None else 1
    each = max(sum(done_s) / len(done_s) if done_s else estimate_s, 1e-9)
    if wanted_s is None:
        left = iterations - len(done_s)
    else:
        left = round(min((wanted_s - sum(done_s)) / each, MAX_ITERATIONS - len(done_s)))
        left = max(left, 0 if done_s else 1)
    return max(0, min(left, max(1, int(LOOP_S / each)), _MAX_LOOP))
