"""Times of iterations over all ranks, and how many there are."""

from __future__ import annotations

import pytest

from mtb_comm.points import MAX_ITERATIONS
from mtb_comm.timing import iteration_times, next_loop, time_statistics, timed_loop


def test_iteration_ends_with_the_last_rank():
    """A rank that runs ahead hides nothing, one that lags shows, and the mean is the loop's time by its iterations."""
    times = iteration_times([[1.0, 2.0, 6.0], [2.0, 3.0, 5.0]])
    assert times == [2.0, 1.0, 3.0]
    assert sum(times) / 3 == max(6.0, 5.0) / 3


def test_ranks_that_wait_in_turn_are_not_counted_twice():
    """Each rank late in turn: the slowest calls alone would come to 2 s an iteration, the loop took 1.25."""
    assert iteration_times([[2.0, 2.5, 4.5, 5.0], [1.0, 3.0, 3.5, 5.0]]) == [2.0, 1.0, 1.5, 0.5]


def test_statistics_are_ordered():
    """Ordered: min <= p50 <= p95 <= p99 <= max, in milliseconds, mean between the ends."""
    found = time_statistics([0.003, 0.001, 0.002, 0.010])
    assert found["mean"] == pytest.approx(4.0)
    assert [found[k] for k in ("min", "p50", "max")] == pytest.approx([1.0, 2.5, 10.0])
    assert found["min"] <= found["p50"] <= found["p95"] <= found["p99"] <= found["max"]


def test_loop_calls_as_often_as_asked():
    """One end for each call, none before the one before it."""
    calls = []
    ends = timed_loop(lambda: calls.append(1), 7, "cpu")
    assert len(calls) == len(ends) == 7
    assert ends == sorted(ends)


def run_loops(iterations, wanted, estimate, each):
    done, loops = [], []
    while count := next_loop(done, iterations, wanted, estimate):
        loops.append(count)
        done += [each] * count
    return loops


def test_fixed_number_of_iterations():
    """Short ones run in one loop, long ones in several, so that a stop is noticed; the sum is exact."""
    assert run_loops(20, None, 0.001, 0.001) == [20]
    assert sum(run_loops(20, None, 0.5, 0.5)) == 20
    assert max(run_loops(20, None, 0.5, 0.5)) == 4
    assert run_loops(3, None, 60.0, 60.0) == [1, 1, 1]
    assert run_loops(20, None, 0.0, 0.001) == [1, 19]
    assert run_loops(0, None, 0.0, 0.001) == []


def test_wanted_time():
    """As many as take about so long, at least one, even where the estimate was far off or is missing."""
    assert sum(run_loops(20, 1.0, 0.01, 0.01)) == 100
    assert 99 <= sum(run_loops(20, 1.0, 0.1, 0.01)) <= 101
    assert run_loops(20, 1.0, 60.0, 60.0) == [1]
    assert run_loops(20, 1.0, 0.0, 0.01) == [1, 99]


def test_number_of_iterations_is_bounded():
    """However short an iteration seems, what is kept of each fits into memory."""
    loops = run_loops(20, 1e300, 1e-9, 1e-6)
    assert sum(loops) == MAX_ITERATIONS
    assert max(loops) <= MAX_ITERATIONS / 10
