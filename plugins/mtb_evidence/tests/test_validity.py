"""Times are valid only where nothing disturbed them, and the reason is named where something did."""

from __future__ import annotations

import os
import sys
from typing import Any

import attrs
import pytest

from mtb_core import ConfigError, Layout, RankContext, TrainConfig, World, run
from mtb_evidence.validity import (
    RankUse,
    Sample,
    Timed,
    conditions,
    cpu_times,
    debug_flags,
    formal_obstacles,
    gather_uses,
    performance_fields,
    throttle_notes,
    usable_cores,
)

START = Sample(at_s=100.0, load_average=0.5, busy_s=1000.0, total_s=9000.0, steal_s=5.0, own_s=1.0, throttled=3)
#: Ten seconds on four cores later; both ranks have computed all the time.
END = Sample(at_s=110.0, load_average=2.0, busy_s=1020.0, total_s=9040.0, steal_s=5.0, own_s=11.0, throttled=3)
GOOD = Timed(20, p50_ms=10.0, p95_ms=10.5)


def ranks(start: dict[str, Any] = {}, end: dict[str, Any] = {}, **changes: Any) -> list[RankUse]:  # noqa: B006
    first, last = attrs.evolve(START, **start), attrs.evolve(END, **end)
    use = RankUse(0, first, last, cores=4, machine_cores=4, threads=1)
    return [attrs.evolve(use, local_rank=rank, **changes) for rank in range(2)]


def reasons(uses: list[RankUse], timed: list[Timed] | None = None, **more: Any) -> list[str]:
    fields = performance_fields(uses, [GOOD] if timed is None else timed, **{"device": "cpu", **more})
    found: list[str] = fields["performance_invalid_reasons"]
    assert fields["performance_valid"] is not bool(found)
    return found


def test_a_quiet_machine_has_no_reasons() -> None:
    """Nothing but our ranks ran, on enough cores, for enough steady steps."""
    assert reasons(ranks()) == []
    assert conditions(ranks()) == {
        "cores": 4,
        "load_average_start": 0.5,
        "load_average_end": 2.0,
        "other_cpu_share": 0.0,
        "steal_share": 0.0,
        "throttle_events": 0,
        "duration_s": 10.0,
    }


@pytest.mark.parametrize(
    ("uses", "words"),
    [
        (ranks(start={"load_average": 7.0}), "load average 7.0 on 4 cores"),
        (ranks(end={"load_average": 10.5}), "at the end: load average 10.5 on 4 cores"),
        (ranks(end={"busy_s": 1030.0}), "other processes used 25%"),
        (ranks(end={"steal_s": 7.0}), "hypervisor took 5%"),
        (ranks(end={"throttled": 5}), "because of heat 2 times"),
        (ranks(threads=3), "6 threads of ranks share 4 cores"),
        (ranks(notes=("CUDA_LAUNCH_BLOCKING=1 is set",)), "CUDA_LAUNCH_BLOCKING=1"),
    ],
)
def test_each_disturbance_is_named(uses: list[RankUse], words: str) -> None:
    """One thing wrong, one reason, with the figures."""
    (reason,) = reasons(uses)
    assert words in reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": 9}, "only 9 measured steps in a trial"),
        ({"count": 0}, "a trial has no measured step"),
        ({"p95_ms": 15.5}, "step times are not stable: p95 is 1.55 times p50"),
    ],
)
def test_each_uncertainty_is_named(change: dict[str, Any], words: str) -> None:
    """Too few or unsteady steps in any one trial are enough."""
    (reason,) = reasons(ranks(), [GOOD, attrs.evolve(GOOD, **change)])
    assert words in reason


def test_what_a_system_does_not_tell_is_no_reason() -> None:
    """Without /proc nothing is invented."""
    silent = {"load_average": None, "busy_s": None, "total_s": None, "steal_s": None, "throttled": None}
    uses = ranks(start=silent, end=silent)
    assert reasons(uses) == []
    assert conditions(uses)["other_cpu_share"] is None


def test_the_worst_node_counts() -> None:
    """Of two nodes, each with its own ranks, the loaded one decides."""
    uses = [*ranks(), *ranks(end={"busy_s": 1030.0})]
    assert conditions(uses)["other_cpu_share"] == 0.25
    assert any("other processes" in reason for reason in reasons(uses))


def test_on_gpus_ranks_not_threads_need_cores() -> None:
    """Threads of torch idle there."""
    assert reasons(ranks(threads=4), device="cuda") == []
    assert reasons(ranks(threads=4, cores=1), device="cuda") == ["2 ranks share 1 cores"]


def test_proc_stat_is_read_as_documented() -> None:
    """Busy time leaves out idle, waiting for disks and stolen time; guest time is not counted twice."""
    ticks = os.sysconf("SC_CLK_TCK")
    line = " ".join(str(n * ticks) for n in (10, 1, 5, 100, 20, 2, 3, 4, 9, 0))
    assert cpu_times(f"cpu  {line}\ncpu0 1 2\n") == (21.0, 145.0, 4.0)
    assert cpu_times("nothing") == (None, None, None)


def test_debug_flags() -> None:
    """Only values that slow a run down count."""
    assert debug_flags({"NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "off"}) == ([])
    found = debug_flags({"NCCL_DEBUG": "TRACE", "CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert len(found) == 3


@pytest.mark.parametrize(
    "flag",
    [
        "TORCH_NCCL_BLOCKING_WAIT=1", "PYTHONTRACEMALLOC=25", "TORCH_USE_CUDA_DSA=1", "TORCH_COMPILE_DEBUG=1",
        "TORCH_LOGS=dynamo,+aot", "LD_PRELOAD=/usr/lib/libasan.so.8", "TORCH_CPP_LOG_LEVEL=INFO",
        "CUBLAS_LOGINFO_DBG=1", "CUDNN_LOGLEVEL_DBG=3", "PYTHONASYNCIODEBUG=1",
    ],
)  # fmt: skip
def test_each_debug_flag_is_named(flag: str) -> None:
    """One reason for each; switched off or quiet, none."""
    name, _, value = flag.partition("=")
    assert len(debug_flags({name: value})) == 1
    quiet = {"TORCH_LOGS": "recompiles", "LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}
    assert debug_flags({name: quiet.get(name, "")}) == []


@pytest.mark.parametrize("timed", [[], [Timed(0)]])
def test_without_a_measured_step_nothing_is_valid(timed: list[Timed]) -> None:
    """A run that ended before its first measured step has no times to compare."""
    assert reasons(ranks(), timed) == ["no step was measured"]


def test_other_kinds_say_what_they_timed() -> None:
    """Calls of collectives have no rule of spread; what the caller knows comes first."""
    timed = [Timed(20), Timed(1)]
    found = reasons(ranks(), timed, each="call", row="point", reasons=["2 rows have wrong elements"])
    assert found == ["2 rows have wrong elements", "only 1 measured call in a point, fewer than 10"]
    assert reasons(ranks(), timed[:1]) == []


def test_where_ranks_did_not_come_to_their_end_nothing_is_known() -> None:
    """Nothing is invented of the machine, and the times are not valid."""
    fields = performance_fields([], [GOOD], device=None)
    assert (fields["conditions"], fields["performance_valid"]) == ({}, False)
    assert "not every rank came to its end" in fields["performance_invalid_reasons"][0]


def test_shares_of_a_moment_are_not_told() -> None:
    """The system counts in hundredths of a second: of half a second of all cores nothing is made."""
    moment = {"total_s": START.total_s + 0.5, "busy_s": START.busy_s + 0.4, "steal_s": START.steal_s + 0.02}
    uses = ranks(end={**moment, "own_s": START.own_s})
    assert reasons(uses) == []
    assert (conditions(uses)["other_cpu_share"], conditions(uses)["steal_share"]) == (None, None)


@pytest.mark.parametrize(
    ("allowed", "quota", "cores"), [(4, None, 4), (4, 1.5, 1), (4, 0.5, 1), (4, 16.0, 4), (4, 2.0, 2)]
)
def test_a_containers_quota_limits_the_cores(allowed: int, quota: float | None, cores: int) -> None:
    """Cores that a container sees but may not use all the time do not count."""
    assert usable_cores(allowed, quota) == cores


def test_a_profiler_is_seen() -> None:
    """A Python profiler slows every call."""
    sys.setprofile(lambda *_: None)
    try:
        found = debug_flags({})
    finally:
        sys.setprofile(None)
    assert found == ["a debugger, coverage or Python profiler is on"]


def test_gpu_throttling() -> None:
    """A GPU that is slowed down is named by reason; what it does not support is none."""
    assert throttle_notes("Not Active, Active, [N/A]\nNot Active, Active, Not Active\n") == [
        "a GPU is slowed down: hw_thermal_slowdown"
    ]


def test_own_work_is_not_that_of_others() -> None:
    """CPU time that this process uses is its own, real samples of this machine add up."""
    start = Sample.take()
    while Sample.take().own_s < start.own_s + 0.2:
        sum(range(1000))
    (use,) = gather_uses(RankContext(0, 0, World(1, 1), "cpu", None, Layout((("ranks", 1),), {"ranks": "data"})), start)
    found = conditions([use])
    assert use.end.own_s - use.start.own_s > 0.19
    assert found["duration_s"] > 0
    assert found["other_cpu_share"] is None or 0 <= found["other_cpu_share"] <= 1


def test_a_short_run_says_that_it_is_short(tmp_path: Any) -> None:
    """result.json of a real run has the conditions, median and 95th percentile, and the reason why it is not valid."""
    size = {"seq_length": 8, "d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 64}
    config = TrainConfig(steps=3, warmup_steps=0, device="cpu", sink=("jsonl",), run_dir=str(tmp_path / "run"), **size)
    result = run(config, quiet=True).check()
    assert result.performance_valid is False
    assert any("only 3 measured steps" in reason for reason in result.performance_invalid_reasons)
    assert result.conditions["cores"] >= 1
    assert 0 < result.step_time_p50_ms <= result.step_time_p95_ms


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"git_revision": None, "git_dirty": None}, "revision of the code is not known"),
        ({"git_dirty": True}, "tracked files differ"),
        ({"git_dirty": None}, "whether tracked files differ"),
        ({"build_revision": "def"}, "built from def"),
    ],
)
def test_what_must_not_be_published(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str) -> None:
    """A changed or unknown tree and an image of another revision each are an obstacle; a clean tree is none."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    clean = {"git_revision": "abc", "git_dirty": False, "build_revision": "abc"}
    assert formal_obstacles(clean) == []
    (obstacle,) = formal_obstacles({**clean, **change})
    assert words in obstacle
    assert formal_obstacles({**clean, "git_revision": "0123abcdef", "build_revision": "0123abc"}) == []


def test_a_busy_machine_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """More processes than its cores can serve."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    (obstacle,) = formal_obstacles({"git_revision": "abc", "git_dirty": False, "build_revision": None})
    assert "load average 1000.0" in obstacle


def test_a_formal_run_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts or is written."""
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    with pytest.raises(ConfigError, match=r"--formal cannot begin.*load average"):
        run(TrainConfig(formal=True, run_dir=str(tmp_path / "run")), quiet=True)
    assert not (tmp_path / "run").exists()
