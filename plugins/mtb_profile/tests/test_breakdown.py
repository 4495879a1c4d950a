"""Where the time goes, on traces whose answer can be worked out by hand."""

from __future__ import annotations

import random

import pytest

from mtb_profile.breakdown import activity, step_activity
from mtb_profile.loading import load_trace
from mtb_profile.windows import look


def times(path, window=None):
    return activity(look(load_trace(path), window)).times()


def us(found):
    return {name: getattr(found, name) / 1e3 for name in found.__slots__ if not name.startswith("__")}


@pytest.fixture
def device(tracing, tmp_path):
    """Two steps of a device that runs behind its host, one kernel before them, a copy, and a wait that is no work."""
    t = tracing.Trace()
    t.kernel("early", 0, 5, launch=-3)
    t.step(0, 10, 50).step(1, 60, 40)
    t.kernel("gemm", 20, 40, launch=15)  # 20..60
    t.kernel("gemm", 30, 10, launch=16, stream=8)  # inside the first: counts once
    t.nccl("allreduce", 50, 40, launch=30)  # 50..90, of which 10 are hidden
    t.kernel("Memcpy DtoD", 80, 20, launch=40, cat="gpu_memcpy")  # 80..100, of which 10 are hidden
    t.kernel("Stream Sync", 100, 500, launch=45)
    t.kernel("gemm", 110, 10, launch=70)  # 110..120, of the second step
    return t.write(tmp_path / "rank_0.json")


def test_parts_of_a_device(device):
    """The first step's work counts though it ran while the host was in the second; the sum is the span."""
    assert us(times(device, "steps-but-last")) == {
        "span": 80.0, "compute": 40.0, "communication": 40.0, "overlapped": 10.0, "exposed": 30.0, "memory": 10.0,
        "memory_total": 20.0, "idle": 0.0,
    }  # fmt: skip


def test_windows_of_a_device(device):
    """`steps` takes what the steps launched, `trace` everything."""
    whole, steps = us(times(device, "trace")), us(times(device, "steps"))
    assert (whole["span"], whole["compute"], whole["idle"]) == (120.0, 55.0, 25.0)
    assert (steps["span"], steps["compute"], steps["idle"]) == (100.0, 50.0, 10.0)
    assert times(device) == times(device, "steps")


def test_parts_of_a_host(tracing, tmp_path):
    """On a CPU, exposed is gloo's ranges less what other threads compute; operators on gloo's threads are its own."""
    t = tracing.Trace()
    t.step(0, 0, 100).step(1, 100, 100)
    t.op("aten::mm", 0, 30).op("aten::t", 5, 2)
    t.op("autograd::engine::evaluate_function: X", 30, 60)  # a container, in which a hook waits
    t.gloo("all_reduce", 20, 50)  # 20..70, of which 10 are hidden
    t.op("aten::copy_", 40, 20, tid=9)
    t.op("c10d::allreduce_", 71, 9)
    t.op("aten::mm", 95, 20)  # reaches into the next step
    path = t.write(tmp_path / "rank_0.json")
    assert us(times(path, "steps-but-last")) == {
        "span": 100.0, "compute": 35.0, "communication": 50.0, "overlapped": 10.0, "exposed": 40.0, "memory": 0.0,
        "memory_total": 0.0, "idle": 25.0,
    }  # fmt: skip
    view = look(load_trace(path), None)
    both = [step_activity(view, s).times() for s in view.steps.steps]
    assert sum(s.compute for s in both) == times(path, "steps").compute == 50_000


def test_steps_without_marks(tracing, tmp_path):
    """Without ProfilerStep marks a step ends where the optimizer's range does; the first, cut-off one is none."""
    t = tracing.Trace()
    for i in range(3):
        t.op("aten::mm", 100 * i, 50).mark("Optimizer.step#SGD.step", 100 * i + 80, 10)
    view = look(load_trace(t.write(tmp_path / "t.json")), None)
    assert view.steps.source == "Optimizer.step"
    assert [(s.start / 1e3, s.end / 1e3) for s in view.steps.steps] == [(90.0, 190.0), (190.0, 290.0)]
    assert us(activity(view).times())["compute"] == 100.0


def test_without_any_steps(tracing, tmp_path):
    """A trace that shows no steps is looked at as a whole, and says so."""
    path = tracing.Trace().op("aten::mm", 0, 5).op("aten::mm", 8, 2).write(tmp_path / "t.json")
    assert look(load_trace(path), "steps").window == "trace"
    assert us(times(path, "steps"))["idle"] == 3.0


def test_sums_on_random_traces(tracing, tmp_path):
    """Whatever the events, the parts sum to the span, and nothing is negative: exactly, in nanoseconds."""
    dice = random.Random(7)
    for number in range(20):
        t = tracing.Trace(baseTimeNanoseconds=1_790_857_026_000_000_000)
        t.step(0, 0.0, 500.123)
        for _ in range(dice.randint(1, 60)):
            start, length = round(dice.uniform(0, 900), 3), round(dice.uniform(0, 80), 3)
            launch = round(dice.uniform(0, 600), 3)
            kind = dice.choice(("gemm", "allreduce", "Memcpy"))
            if kind == "allreduce":
                t.nccl(kind, start, length, launch=launch)
            else:
                t.kernel(kind, start, length, launch=launch, cat="kernel" if kind == "gemm" else "gpu_memcpy")
        path = t.write(tmp_path / f"{number}.json")
        for window in ("trace", "steps"):
            found = times(path, window)
            assert found.compute + found.exposed + found.memory + found.idle == found.span
            assert found.overlapped + found.exposed == found.communication
            assert min(found.compute, found.exposed, found.overlapped, found.memory, found.idle) >= 0


def test_metadata_of_an_operator(tracing, tmp_path):
    """Older traces keep a collective's metadata on the host's operator; the kernel is linked by its External id."""
    t = tracing.Trace()
    meta = {
        "Collective name": "_allgather_base",
        "In msg nelems": 5,
        "Out msg nelems": 10,
        "Group size": 2,
        "dtype": "Half",
    }
    t.op("record_param_comms", 0, 9, **{"External id": 77}, **meta)
    t.kernel("ncclKernel_AllGather_RING_LL_Sum_int8_t(...)", 5, 10, launch=1, **{"External id": 77})
    t.mark("nccl:all_to_all", 20, 10)
    t.kernel("ncclKernel_SendRecv_RING(...)", 25, 10, launch=22)
    first, second = load_trace(t.write(tmp_path / "t.json")).collectives
    assert (first.operation, first.message_bytes, first.group_size) == ("all_gather", 20, 2)
    assert (second.operation, second.message_bytes) == ("all_to_all", None)


@pytest.mark.parametrize(("sizes", "expected"), [((2,), 2), ((4, 4, 1), 4), ((4, 2), None), ((), 4)])
def test_group_of_a_gloo_range(tracing, tmp_path, sizes, expected):
    """Ranges of gloo do not name their group: its size is known where all groups have the same."""
    t = tracing.Trace()
    t.head["distributedInfo"] |= {"world_size": 4, "pg_config": [{"pg_size": size} for size in sizes]}
    t.op("aten::mm", 0, 5).gloo("all_gather", 0, 5, elements=10)
    (collective,) = load_trace(t.write(tmp_path / "t.json")).collectives
    assert (collective.group_size, collective.message_bytes) == (expected, None if expected is None else 40 * expected)
