"""The seven losses of ``--mfu``: they lead from the ideal step to the measured one."""

from __future__ import annotations

import pytest

from mtb_core import ConfigError
from mtb_profile.analysis import analyze
from mtb_profile.losses import Work, find_losses

NAMES = [
    "pipeline_bubble",
    "exposed_communication",
    "recomputation",
    "data_wait",
    "kernel_efficiency",
    "cpu_launch",
    "straggler",
]


def traces(tracing, folder, sleep=0.0, phase="forward"):
    paths = []
    for rank in (0, 1):
        t, at = tracing.Trace(rank), 0.0
        for number in range(3):
            begin = at
            at = tracing.host_step(
                t, number, begin, sleep=sleep if rank else 0.0, phase=phase, late=0.0 if rank else sleep
            )
            at += 5
        paths.append(t.write(folder / f"rank_{rank}.json"))
    return paths


def values(found):
    return {loss.name: loss.ms for loss in found.losses}


def test_steps_without_time_are_refused(tracing, tmp_path):
    """Steps in which nothing takes time have no shares: that is refused in words."""
    trace = tracing.Trace(0, world_size=1).step(0, 0, 100).step(1, 100, 100)
    found = analyze([trace.kernel("gemm", 10, 0, launch=5).write(tmp_path / "rank_0.json")])
    with pytest.raises(ConfigError, match="nothing in the steps of these traces takes any"):
        find_losses(found, Work())


@pytest.mark.parametrize("sleep", [0.0, 40.0])
@pytest.mark.parametrize("recomputes", [False, True])
def test_they_sum(tracing, tmp_path, sleep, recomputes):
    """Ideal step and seven losses are the measured step; the points and MFU are 100."""
    work = Work(flops_per_step=2e6, peak_flops=5e10, recomputes=recomputes)
    found = find_losses(analyze(traces(tracing, tmp_path, sleep)), work)
    assert [loss.name for loss in found.losses] == NAMES
    assert found.ideal_ms == 2e6 / 2 / 5e10 * 1e3
    assert found.ideal_ms + sum(values(found).values()) == pytest.approx(found.measured_ms, abs=1e-12)
    assert found.mfu * 100 + sum(loss.points for loss in found.losses) == pytest.approx(100)
    assert found.measured_ms == pytest.approx((100 + sleep) / 1e3)


def test_each_in_its_place(tracing, tmp_path):
    """Forward computes again where it is recomputed; exposed is the all-reduce; a straggler costs its sleep."""
    work = Work(flops_per_step=2e6, peak_flops=5e10, recomputes=True)
    even = values(find_losses(analyze(traces(tracing, tmp_path / "even")), work))
    assert even == pytest.approx(
        {
            "pipeline_bubble": 0.0,
            "exposed_communication": 0.010,
            "recomputation": 0.030,
            "data_wait": 0.010,
            "kernel_efficiency": 0.080 - 0.020 - 0.030,
            "cpu_launch": 0.0,
            "straggler": 0.0,
        }
    )
    uneven = values(find_losses(analyze(traces(tracing, tmp_path / "uneven", 40.0)), work))
    assert uneven == pytest.approx({**even, "straggler": 0.040})
    in_data = values(find_losses(analyze(traces(tracing, tmp_path / "data", 40.0, "data")), work))
    assert in_data == pytest.approx({**even, "straggler": 0.040})


def test_copies_are_in_kernel_efficiency(tracing, tmp_path):
    """Copying that nothing hides is device work beyond the ideal, and still the sum is the step."""
    t = tracing.Trace(world_size=1)
    for number in range(2):
        at = number * 100
        t.step(number, at, 100).kernel("gemm", at, 60, launch=at)
        t.kernel("Memcpy", at + 60, 40, launch=at + 1, cat="gpu_memcpy")
    found = find_losses(analyze([t.write(tmp_path / "t.json")]), Work(50e3, 1e9, 1, recomputes=False))
    assert found.ideal_ms == pytest.approx(0.050)
    assert values(found)["kernel_efficiency"] == pytest.approx(0.050)
    assert found.ideal_ms + sum(values(found).values()) == pytest.approx(found.measured_ms)


def test_unknown_is_not_nothing(tracing, tmp_path):
    """Without FLOPs or peak there is no ideal step, and kernel efficiency is unknown, not 0; the notes say so."""
    found = find_losses(analyze(traces(tracing, tmp_path)), Work())
    assert (found.ideal_ms, found.mfu) == (None, None)
    assert {name for name, ms in values(found).items() if ms is None} == {"recomputation", "kernel_efficiency"}
    assert "0.080 ms" in found.notes[0]
    assert any("recomputed is not known" in note for note in found.notes)


def test_impossible_peak_is_said(tracing, tmp_path):
    """An ideal step longer than the time computed shows that FLOPs or peak are wrong."""
    found = find_losses(analyze(traces(tracing, tmp_path)), Work(flops_per_step=2e6, peak_flops=1e9))
    assert any("are wrong" in note for note in found.notes)


def test_order_of_repair(tracing, tmp_path):
    """Configuration comes before hardware, hardware before structure."""
    work = Work(flops_per_step=1e5, peak_flops=5e10, recomputes=True)
    order = find_losses(analyze(traces(tracing, tmp_path, 40.0)), work).in_order_of_repair()
    assert [loss.name for loss in order] == ["data_wait", "straggler"]


def test_bubble_is_waiting_in_point_to_point(tracing, tmp_path):
    """Exposed sends and receives are the pipeline's bubble, not exposed communication."""
    t = tracing.Trace(0)
    for number in range(2):
        at = number * 100
        t.step(number, at, 100).kernel("gemm", at, 50, launch=at).nccl("recv", at + 50, 30, launch=at + 1)
        t.nccl("allreduce", at + 80, 20, launch=at + 2)
    found = values(find_losses(analyze([t.write(tmp_path / "t.json")]), Work()))
    assert (found["pipeline_bubble"], found["exposed_communication"]) == pytest.approx((0.030, 0.020))


def test_steps_are_needed(tracing, tmp_path):
    """A trace without steps cannot be divided by them."""
    path = tracing.Trace().op("aten::mm", 0, 5).write(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="--mfu needs steps"):
        find_losses(analyze([path]), Work())
