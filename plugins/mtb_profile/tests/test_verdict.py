"""What bounds a run: each verdict on a trace made for it, and none without evidence."""

from __future__ import annotations

import pytest

from mtb_profile.analysis import analyze
from mtb_profile.document import document
from mtb_profile.setting import NOT_VALID, setting_of
from mtb_profile.verdict import judge, shares


def one(tracing, folder, *, gemm, wait=0, reduce=0, phase="forward"):
    """Steps of 1000 µs of a device: a gap before the work of a phase, a gemm, an all-reduce."""
    t = tracing.Trace(world_size=1)
    for number in range(4):
        at = number * 1000
        t.step(number, at, 1000).mark(phase, at, 20)
        t.kernel("first", at, 1, launch=at + 21)
        t.kernel("gemm", at + wait, gemm, launch=at + 10)
        if reduce:
            t.nccl("allreduce", at + wait + gemm, reduce, launch=at + 30)
        t.kernel("last", at + 999, 1, launch=at + 31)
    return analyze([t.write(folder / "t.json")])


@pytest.mark.parametrize(
    ("bound", "trace"),
    [
        ("compute-bound", {"gemm": 980}),
        ("communication-bound", {"gemm": 400, "reduce": 580}),
        ("data-bound", {"gemm": 400, "wait": 590, "phase": "dataloader"}),
        ("host-bound", {"gemm": 400, "wait": 590}),
    ],
)
def test_bounds(tracing, tmp_path, bound, trace):
    """The largest loss names the verdict; without one, it is computation."""
    found = judge(one(tracing, tmp_path, **trace))
    assert found.bound == bound
    assert found.evidence
    assert found.advice


def varied(tracing, folder, reduces, wait=0):
    """Steps of 1000 µs of a device with an all-reduce of different lengths."""
    t = tracing.Trace(world_size=1)
    for number, reduce in enumerate(reduces):
        at = number * 1000
        t.step(number, at, 1000).mark("forward", at, 20).kernel("first", at, 1, launch=at + 21)
        t.kernel("gemm", at + wait, 1000 - wait - reduce, launch=at + 10)
        t.nccl("allreduce", at + 1000 - reduce, reduce, launch=at + 30)
    return analyze([t.write(folder / "t.json")])


@pytest.mark.parametrize(
    ("reduces", "wait", "bound", "text"),
    [
        (
            [100, 120, 140],
            0,
            "undetermined",
            "Communication that no computation hides takes 12% of the time, and from 15%",
        ),
        ([160, 400, 100], 0, "undetermined", "3 steps that differ as these do cannot tell on which side of that it is"),
        ([100, 110, 120, 110, 100, 120], 0, "compute-bound", "Computation fills 89%"),
        ([400, 390, 410], 0, "communication-bound", "takes 40% of the time"),
        (
            [400, 300, 350],
            330,
            "undetermined",
            "takes 35% of the time, other idling 33%: 3 steps that differ as these do",
        ),
        ([400, 600, 10, 10], 0, "undetermined", "Communication"),
    ],
)
def test_a_margin_within_the_spread_is_none(tracing, tmp_path, reduces, wait, bound, text):
    """A loss bounds the run, or does not, only where the steps' spread leaves no doubt; otherwise both are named."""
    found = judge(varied(tracing, tmp_path, reduces, wait))
    assert found.bound == bound
    assert text in found.text


def two_hosts(tracing, folder, own):
    """Two ranks whose forward takes longer by `own` µs, a pair for each step."""
    traces, at = (tracing.Trace(0), tracing.Trace(1)), 0.0
    for number, more in enumerate(own):
        ends = [
            tracing.host_step(t, number, at, sleep=float(more[r]), late=float(max(more) - more[r]))
            for r, t in enumerate(traces)
        ]
        at = max(ends) + 5
    return analyze([t.write(folder / f"rank_{r}.json") for r, t in enumerate(traces)])


def test_a_rank_that_chance_explains_too(tracing, tmp_path):
    """It is no straggler, and neither communication is to blame: the evidence names it, with the probability."""
    analysis = two_hosts(tracing, tmp_path, [(0, 40), (0, 150), (0, 70)])
    found = judge(analysis)
    assert (found.bound, analysis.stragglers) == ("undetermined", [])
    assert [s.rank for s in analysis.suspects] == [1]
    assert "A rank seems to hold the others up" in found.text
    assert any("3 of 3 steps" in line and "Chance may show as much" in line for line in found.evidence)


def test_what_the_run_tells_of_its_conditions(tracing, tmp_path):
    """Why its times are uncertain stands beside the verdict; advice about machines is for runs on several."""
    analysis = two_hosts(tracing, tmp_path, [(0, 40)] * 3)
    result = {
        "config": {"nnodes": "1", "nproc": 2}, "world_size": 2,
        "performance_invalid_reasons": [NOT_VALID, "the machine was loaded before: load average 9.0 on 2 cores"],
    }  # fmt: skip
    found = judge(analysis, setting_of(result))
    assert found.uncertain_because == result["performance_invalid_reasons"][1:]
    assert found.advice[0].startswith("All ranks share one machine")
    for elsewhere in ({}, {**result, "config": {"nnodes": "2", "nproc": 1}}, {"performance_invalid_reasons": "?"}):
        assert judge(analysis, setting_of(elsewhere)).advice[0].startswith("Compare the slow rank's machine")
    assert judge(analysis).uncertain_because == []


def test_nothing_stands_out(tracing, tmp_path):
    """Several small losses, and not much computation, prove nothing."""
    t = tracing.Trace(world_size=1)
    for number in range(4):
        at = number * 1000
        t.step(number, at, 1000).mark("dataloader", at, 20).mark("forward", at + 30, 20)
        t.kernel("gemm", at, 580, launch=at + 60).nccl("allreduce", at + 580, 140, launch=at + 61)
        t.kernel("Memcpy", at + 720, 1, launch=at + 62, cat="gpu_memcpy")
        t.kernel("copy", at + 860, 1, launch=at + 5).kernel("last", at + 999, 1, launch=at + 40)
    found = judge(analyze([t.write(tmp_path / "t.json")]))
    assert found.bound == "undetermined"
    assert "Nothing stands out" in found.text


def test_no_computation_is_no_evidence(tracing, tmp_path):
    """A trace of communication alone says nothing about what bounds a run."""
    t = tracing.Trace().step(0, 0, 100).nccl("allreduce", 10, 20, launch=5)
    assert judge(analyze([t.write(tmp_path / "t.json")])).bound == "undetermined"


def test_one_rank_of_several(tracing, tmp_path):
    """With one rank's trace, what looks like communication may be waiting; the evidence says so."""
    t = tracing.Trace(world_size=8).step(0, 0, 100)
    t.kernel("gemm", 0, 20, launch=1).nccl("allreduce", 20, 80, launch=2)
    found = judge(analyze([t.write(tmp_path / "t.json")]))
    assert found.bound == "communication-bound"
    assert "all ranks' traces" in found.evidence[-1]
    assert "in which waiting for other ranks may be" in found.evidence[0]


def test_waiting_that_cannot_be_known_is_not_nought(tracing, tmp_path):
    """Of one rank of eight it is not known; of the only rank it is."""
    for ranks, expected in ((8, None), (1, 0.0)):
        t = tracing.Trace(world_size=ranks).step(0, 0, 100)
        t.kernel("gemm", 0, 20, launch=1).nccl("allreduce", 20, 80, launch=2)
        analysis = analyze([t.write(tmp_path / f"{ranks}.json")])
        assert document(analysis, judge(analysis))["ranks"][0]["waiting_us"] == expected


def test_shares_sum_to_one(tracing, tmp_path):
    """All of the time is accounted for once."""
    s = shares(one(tracing, tmp_path, gemm=300, wait=200, reduce=100))
    assert sum((s.compute, s.transfer, s.waiting, s.memory, s.data, s.host)) == pytest.approx(1)


def test_waiting_in_turn(tracing, tmp_path):
    """Ranks that wait for each other without one being the slow one are said to be disturbed in turn."""
    first, second, at = tracing.Trace(0), tracing.Trace(1), 0.0
    for number in range(4):
        slow, other = (first, second) if number % 2 else (second, first)
        tracing.host_step(other, number, at, late=40.0)
        at = tracing.host_step(slow, number, at, sleep=40.0) + 5
    paths = [t.write(tmp_path / f"rank_{r}.json") for r, t in enumerate((first, second))]
    analysis = analyze(paths)
    assert analysis.stragglers == analysis.suspects == []
    assert judge(analysis).bound == "undetermined"
    evidence = " ".join(judge(analysis).evidence)
    assert "disturbed in turn" in evidence
    assert "Computation hides 0% of the communication." in evidence
