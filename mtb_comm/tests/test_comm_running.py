"""Whole measurements on real ranks over gloo."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import attrs
import pytest

from mtb_comm.bench import Work
from mtb_comm.bench import measure as measure_rows
from mtb_comm.definitions import DTYPE_BYTES, OPERATIONS, REDUCTIONS
from mtb_comm.points import CommRequest
from mtb_comm.running import measure_all
from mtb_core import ConfigError, run_ranks

OPERATION_NAMES = tuple(OPERATIONS)


def _ranks_module():
    name = "mtb_comm_tests_ranks"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("ranks.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def measure(request, nproc, **options):
    return measure_all(request, nproc=nproc, device="cpu", quiet=True, **options)


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_every_operation_is_right(nproc):
    """All operations, placements and splits: each row is measured and right, or skipped for a reason."""
    request = CommRequest(
        operations=OPERATION_NAMES, sizes=(100, 3000), placements=(False, True), split_kinds=("equal", "uneven"),
        iterations=2, warmup=1,
    )  # fmt: skip
    document = measure(request, nproc)
    assert (document["exit_reason"], document["world_size"]) == ("done", nproc)
    for row in document["results"]:
        assert (row["status"], row["wrong"]) in {("ok", 0), ("skipped", None)}, row
        assert (row["reason"] is None) == (row["status"] == "ok")
    measured = {row["operation"] for row in document["results"] if row["status"] == "ok"}
    assert measured == set(OPERATION_NAMES) - ({"send_recv"} if nproc == 1 else set())
    assert {row["busbw_gb_per_sec"] for row in document["results"] if row["status"] == "ok" and nproc == 1} <= {
        0.0,
        None,
    }


def test_every_dtype_and_reduction():
    """The table of what gloo can do is right: nothing that is tried is refused, and every result is exact."""
    request = CommRequest(
        operations=("all_reduce", "reduce", "reduce_scatter"), sizes=(96,), dtypes=tuple(DTYPE_BYTES),
        reductions=REDUCTIONS, iterations=1, warmup=0,
    )  # fmt: skip
    rows = measure(request, 3)["results"]
    assert len(rows) == 3 * len(DTYPE_BYTES) * len(REDUCTIONS)
    assert {row["wrong"] for row in rows if row["status"] == "ok"} == {0}
    assert not [row["reason"] for row in rows if row["status"] == "skipped" and "refused" in row["reason"]]


def test_a_wrong_element_is_found():
    """One element off on one rank: that row fails with 1 wrong, the document says so, other rows stand."""
    request = CommRequest(operations=("all_reduce", "broadcast"), sizes=(400,), iterations=1, warmup=0)
    document = measure(request, 2, tamper=_ranks_module().one_wrong)
    assert [(r["operation"], r["status"], r["wrong"]) for r in document["results"]] == [
        ("all_reduce", "ok", 0),
        ("broadcast", "failed", 1),
    ]
    assert not document["performance_valid"]
    assert document["performance_invalid_reasons"][0] == "1 rows have wrong elements"


def test_swapped_chunks_are_found():
    """Chunks of the right data in the wrong places are wrong."""
    request = CommRequest(operations=("all_to_all",), sizes=(4000,), iterations=1, warmup=0)
    (row,) = measure(request, 2, tamper=_ranks_module().swapped)["results"]
    assert row["wrong"] > 900


def test_a_dying_rank_ends_all_and_rows_are_kept():
    """Rows that were finished before a rank was killed are in the document, which names the rank."""
    request = CommRequest(operations=("all_reduce", "gather", "broadcast"), sizes=(400,), iterations=1, warmup=0)
    document = measure(request, 2, tamper=_ranks_module().dies)
    assert document["exit_reason"] == "failed"
    assert [r["operation"] for r in document["results"]] == ["all_reduce"]
    assert "Rank 1 died by SIGKILL" in document["failure"]["text"]
    assert (document["world_size"], document["backend"], document["execution_complete"]) == (2, "gloo", False)
    assert (document["performance_valid"], document["conditions"]) == (False, {})
    assert document["performance_invalid_reasons"][0] == "the run ended early: failed"


def test_groups_run_at_once():
    """Two groups of two: each communicates on its own, rows are of two ranks, and results are right."""
    request = CommRequest(operations=OPERATION_NAMES, sizes=(400,), iterations=2, warmup=1, group_size=2)
    document = measure(request, 4)
    assert (document["world_size"], document["groups"]) == (4, 2)
    assert {(r["world_size"], r["status"], r["wrong"]) for r in document["results"]} == {(2, "ok", 0)}


def test_splits_with_nothing_in_them():
    """Ranks that send or get nothing take part; the busiest rank is named and busbw is of its bytes."""
    request = CommRequest(
        operations=("all_to_all",), sizes=(1200,), split_kinds=("uneven",), iterations=2, warmup=1,
        splits=((1200, 0, 0), (1200, 0, 0), (1200, 0, 0)),
    )  # fmt: skip
    (row,) = measure(request, 3)["results"]
    assert (row["status"], row["wrong"], row["busiest_rank"], row["wire_bytes"]) == ("ok", 0, 0, 1200)
    assert row["busbw_gb_per_sec"] == pytest.approx(2400 / (row["time_ms"]["mean"] * 1e-3) / 1e9)


def test_number_of_calls(monkeypatch):
    """Exactly the warm-up and the iterations, without a check; one more with it."""
    import torch.distributed as dist

    calls = []
    real = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda *args: (calls.append(1), real(*args)))
    for check, extra in ((False, 0), (True, 1)):
        calls.clear()
        request = CommRequest(operations=("all_reduce",), sizes=(64,), iterations=7, warmup=3, check=check)
        (row,) = measure(request, 1)["results"]
        assert (len(calls), row["iterations"]) == (3 + 7 + extra, 7)


def test_a_slow_warm_up_does_not_count(monkeypatch):
    """A hundred hours in the very first call, by the clock that is read, are in no figure."""
    import time

    import torch.distributed as dist

    reduce, clock, calls = dist.all_reduce, time.perf_counter, []
    hours = 360e3
    monkeypatch.setattr(dist, "all_reduce", lambda *args: (calls.append(1), reduce(*args)))
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + (hours if calls else 0))
    request = CommRequest(operations=("all_reduce",), sizes=(64,), iterations=5, warmup=1, check=False)
    (row,) = measure(request, 1)["results"]
    assert len(calls) == 6
    assert row["time_ms"]["max"] < hours


def test_backend_that_turns_out_to_lack_something(monkeypatch):
    """An operation that the backend refuses against the table is a skipped row with the backend's own words."""
    monkeypatch.setattr("mtb_comm.support._reduction", lambda *_args: None)
    request = CommRequest(
        operations=("all_reduce",), sizes=(64,), dtypes=("fp32", "int32"), reductions=("band",), iterations=1
    )
    rows = measure(request, 2)["results"]
    assert [(r["dtype"], r["status"]) for r in rows] == [("fp32", "skipped"), ("int32", "ok")]
    assert rows[0]["reason"] == "gloo refused it: Cannot use ReduceOp.BAND with non-integral dtype"


def test_refused_before_ranks_start():
    """More ranks in a group than there are, and no ranks at all, start nothing."""
    request = CommRequest(operations=("barrier",), sizes=(8,), group_size=3)
    with pytest.raises(ConfigError, match="--group-size is 3, but there are 2"):
        measure(request, 2)
    with pytest.raises(ConfigError, match="at least 1"):
        measure(CommRequest(operations=("barrier",), sizes=(8,)), 0)


class StopLater:
    """A stop flag that is set once it was asked `times` times."""

    def __init__(self, times):
        self.left = times

    @property
    def requested(self):
        self.left -= 1
        return "SIGTERM" if self.left < 0 else None


def stop_on_one(request, ctx, worker):
    """Rank 1 alone is asked to stop, when the check, and two loops of warm-up, are over."""
    stop = StopLater(3 if ctx.rank == 1 else 10**9)
    return measure_rows(Work(request), ctx, attrs.evolve(worker, stop=stop))["stopped"]


@pytest.mark.parametrize(("iterations", "warmup"), [(1, 10**6), (10**6, 0)])
def test_stop_in_the_first_calls(iterations, warmup):
    """A stop is noticed in a warm-up that takes minutes, and without one in the first timed calls."""
    request = CommRequest(operations=("barrier",), sizes=(8,), iterations=iterations, warmup=warmup)
    assert run_ranks(stop_on_one, request, nproc=2, device="cpu").value == "SIGTERM"


def test_a_time_without_warm_up():
    """Without any estimate a point takes about as long as it is to, rather than a thousand million calls."""
    request = CommRequest(operations=("barrier",), sizes=(8,), warmup=0, seconds=1.0)
    (row,) = measure(request, 2)["results"]
    assert 1 < row["iterations"] < 10**6
    assert row["iterations"] * row["time_ms"]["mean"] < 20e3
