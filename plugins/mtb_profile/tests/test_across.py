"""Collectives across ranks, and who holds whom up."""

from __future__ import annotations

import json
import random

import pytest

from mtb_core import ConfigError
from mtb_profile.across import align_clocks, match
from mtb_profile.analysis import analyze
from mtb_profile.loading import load_trace
from mtb_profile.stragglers import find_stragglers
from mtb_profile.verdict import judge
from mtb_profile.windows import look


def views(*paths):
    return [look(load_trace(p, i), None) for i, p in enumerate(paths)]


def two_ranks(tracing, folder, *, sleep=0.0, phase="forward", steps=3, shift=0.0):
    """Two ranks of some steps of which rank 1 sleeps in one phase, and rank 0 waits that long; rank 1's clock is off."""
    first, second = tracing.Trace(0), tracing.Trace(1)
    at = 1000.0
    for number in range(steps):
        tracing.host_step(first, number, at, late=sleep)
        at = tracing.host_step(second, number, at + shift, sleep=sleep, phase=phase) - shift + 5
    return first.write(folder / "rank_0.json"), second.write(folder / "rank_1.json")


def test_waiting_and_transfer(tracing, tmp_path):
    """A collective is waiting until the last rank has come, and transfer from then on; bandwidth is over the transfer."""
    paths = two_ranks(tracing, tmp_path, sleep=40.0)
    found = match(views(*paths))
    assert len(found.matched) == 3
    assert found.unmatched == {}
    assert {(m.last, m.lateness, m.waiting(0), m.transfer(0), m.waiting(1), m.transfer(1)) for m in found.matched} == {
        (1, 40_000, 40_000, 10_000, 0, 10_000)
    }
    rows = {r.rank: r.collectives[0] for r in analyze(paths).ranks}
    assert rows[0].time == 150_000
    assert rows[0].transfer == rows[1].transfer == 30_000
    assert rows[0].algbw == rows[0].busbw == 3 * 4000 / 30_000


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_straggler_is_named(tracing, tmp_path, phase):
    """The rank that sleeps is named, with the phase and the size; the one that waits for it is not."""
    found = analyze(two_ranks(tracing, tmp_path, sleep=40.0, phase=phase))
    (straggler,) = found.stragglers
    assert (straggler.rank, straggler.phase, straggler.excess, straggler.phase_excess) == (1, phase, 40_000, 40_000)
    assert (straggler.slower, straggler.steps, straggler.compute_excess) == (3, 3, 0)
    assert [a.last for a in found.arrivals] == [0, 3]
    verdict = judge(found)
    assert verdict.bound == "straggler-bound"
    assert "Rank 1" in verdict.text
    assert phase in verdict.text


def test_no_straggler_among_equals(tracing, tmp_path):
    """Equal ranks have no straggler, though their communication takes time."""
    found = analyze(two_ranks(tracing, tmp_path))
    assert found.stragglers == []
    assert judge(found).bound == "compute-bound"


def test_a_straggler_is_constant_and_matters():
    """Compared with the median of the others, in most steps, by a twentieth of the step at least; else it is none."""

    def find(*own):
        ranks = {r: dict(enumerate(steps)) for r, steps in enumerate(own)}
        times = {r: {s: {"forward": t} for s, t in steps.items()} for r, steps in ranks.items()}
        length = {r: dict.fromkeys(steps, 100) for r, steps in ranks.items()}
        return [(s.rank, s.excess, s.slower) for s in find_stragglers(times, ranks, length)]

    fast = [50, 50, 50, 50]
    assert find(fast, fast, [60, 60, 60, 60]) == [(2, 10, 4)]
    assert find([20] * 4, fast, [80] * 4, [60] * 4) == [(2, 30, 4), (3, 10, 4)]
    assert find(fast, fast, [54, 54, 54, 54]) == []
    assert find(fast, fast, [60, 60, 40, 40]) == []
    assert find(fast, fast, [50, 50, 50, 990]) == []
    assert find([50] * 5, [50] * 5, [80, 80, 80, 40, 40]) == []
    assert find(fast) == []


def _slow(own):
    """Stragglers and suspects among ranks with these own times, a list of one phase's for each."""
    ranks = {r: dict(enumerate(steps)) for r, steps in enumerate(own)}
    times = {r: {s: {"forward": t} for s, t in steps.items()} for r, steps in ranks.items()}
    length = {r: dict.fromkeys(steps, 100) for r, steps in ranks.items()}
    found = find_stragglers(times, ranks, length)
    return [s.rank for s in found if s.certain], [s.rank for s in found if not s.certain]


def test_few_unsteady_steps_are_no_proof():
    """Slower in all of a few steps that differ much is met by chance; in many it is not, whatever the distribution."""
    steady, unsteady = [50] * 10, [60, 190, 75, 58, 80, 65, 120, 70, 62, 90]
    assert _slow([steady[:3], unsteady[:3]]) == ([], [1])
    assert _slow([steady[:6], unsteady[:6]]) == ([], [1])
    assert _slow([steady, unsteady]) == ([1], [])
    assert _slow([steady[:2], [60, 60]]) == ([1], [])


@pytest.mark.parametrize(("ranks", "steps"), [(2, 2), (2, 3), (2, 10), (8, 3), (8, 10)])
def test_equal_ranks_that_are_disturbed_have_no_straggler(ranks, steps):
    """In at most one of twenty runs of equal ranks, each disturbed at random, one of them is named."""
    draw = random.Random(ranks * 100 + steps)
    runs = [_slow([[draw.lognormvariate(4, 0.5) for _ in range(steps)] for _ in range(ranks)]) for _ in range(400)]
    assert sum(bool(certain) for certain, _ in runs) <= 20
    assert steps == 10 or sum(bool(suspects) for _, suspects in runs) > 20


def test_waiting_inside_a_phase_is_not_the_phase(tracing, tmp_path):
    """A rank that waits in a collective inside backward, as hooks of FSDP do, has no longer backward for that."""
    paths = []
    for rank, (compute, wait) in enumerate([(30.0, 60.0), (30.0, 60.0), (80.0, 10.0)]):
        t = tracing.Trace(rank, world_size=3)
        for number in range(3):
            at = number * 100.0
            t.step(number, at, 95).mark("backward", at, 95)
            t.op("aten::mm", at, compute).gloo("reduce_scatter", at + compute, wait)
        paths.append(t.write(tmp_path / f"rank_{rank}.json"))
    found = analyze(paths)
    assert [r.own[0] for r in found.ranks] == [{"backward": n, "other": 0} for n in (35_000, 35_000, 85_000)]
    (straggler,) = found.stragglers
    assert (straggler.rank, straggler.excess, straggler.compute_excess) == (2, 50_000, 50_000)


def test_stragglers_are_not_known_by_communication(tracing, tmp_path):
    """A rank that is long in communication is the one that waits: long communication alone makes no straggler."""
    found = analyze(two_ranks(tracing, tmp_path, sleep=200.0))
    assert [s.rank for s in found.stragglers] == [1]


def test_unlike_numbers_are_not_guessed(tracing, tmp_path):
    """Where a rank's trace lacks a collective of a step, those of its kind in that step stay unmatched, and it is said."""
    first, second = two_ranks(tracing, tmp_path)
    t = tracing.Trace(1)
    t.events = [
        e
        for e in json.loads(second.read_text())["traceEvents"]
        if not (e["name"].startswith("gloo:") and e["ts"] < 1100)
    ]
    second = t.write(second)
    found = analyze([first, second])
    assert len(found.matching.matched) == 2
    assert found.matching.unmatched == {"seen on one rank only": 1}
    assert any("could not be matched" in note for note in found.notes)


def test_another_number_in_one_step(tracing, tmp_path):
    """A rank with one more of a kind in a step leaves that step's of this kind unmatched, and no others."""
    first, second = two_ranks(tracing, tmp_path)
    t = tracing.Trace(0)
    t.events = json.loads(first.read_text())["traceEvents"]
    found = match(views(t.gloo("all_reduce", 1001, 2).gloo("broadcast", 1001, 2).write(first), second))
    assert [m.step for m in found.matched] == [1, 2]
    assert found.unmatched == {"seen on one rank only": 1, "another number of them on other ranks": 3}


def test_clocks_that_differ(tracing, tmp_path):
    """Ranks whose clocks differ by an hour are brought together; ranks whose clocks agree are left alone."""
    apart = views(*two_ranks(tracing, tmp_path / "apart", sleep=40.0, shift=3.6e9))
    _, shifts = align_clocks(apart)
    assert shifts == {1: -3_600_000_000_000}
    found = analyze([v.trace.path for v in apart])
    assert [a.last for a in found.arrivals] == [0, 3]
    assert any("clock was moved" in note for note in found.notes)
    _, shifts = align_clocks(views(*two_ranks(tracing, tmp_path / "together", sleep=40.0)))
    assert shifts == {}


def test_groups_are_kept_apart(tracing, tmp_path):
    """Collectives of different groups are never one, though their kind and size are the same."""
    paths = []
    for rank, group in ((0, "[0, 1]"), (1, "[0, 1]"), (2, "[2, 3]"), (3, "[2, 3]")):
        t = tracing.Trace(rank, world_size=4).step(0, 0, 100)
        t.kernel("gemm", 0, 10, launch=1).nccl("allreduce", 10 + rank, 20 - rank, launch=2, ranks=group)
        paths.append(t.write(tmp_path / f"rank_{rank}.json"))
    found = match(views(*paths))
    assert sorted(sorted(m.members) for m in found.matched) == [[0, 1], [2, 3]]


def gloo_pairs(tracing, folder, groups):
    """Four ranks of one group and two of its halves; each rank's trace lists `groups` of it. Ranks 2 and 3 come late."""
    paths = []
    for rank in range(4):
        t = tracing.Trace(rank, world_size=4)
        t.head["distributedInfo"]["pg_config"] = groups(rank)
        for number in range(4):
            late = 500.0 if rank >= 2 else 0.0
            t.step(number, number * 1000.0, 999).op("aten::mm", number * 1000.0, 100 + late)
            t.gloo("all_reduce", number * 1000.0 + 100 + late, 20)
        paths.append(t.write(folder / f"rank_{rank}.json"))
    return paths


@pytest.mark.parametrize("ranks", [True, False])
def test_gloo_of_several_groups_is_not_matched(tracing, tmp_path, ranks):
    """A gloo range names no group: where a rank is in several, nothing is matched, and no clock is moved to fit."""

    def groups(rank):
        half = [0, 1] if rank < 2 else [2, 3]
        return [{"pg_size": 4, "ranks": [0, 1, 2, 3]}, {"pg_size": 2, "ranks": half}] if ranks else [{"pg_size": 2}] * 2

    found = analyze(gloo_pairs(tracing, tmp_path, groups))
    assert found.matching.matched == []
    assert found.matching.unmatched == {"group not known": 16}
    assert found.shifts == {}
    assert any("16 collectives could not be matched between ranks: group not known" in note for note in found.notes)


def test_gloo_of_one_group_is_matched_within_it(tracing, tmp_path):
    """Where a rank is in one group of several ranks, that is the group of its ranges; of others they are kept apart."""

    def halves(rank):
        return [{"pg_size": 1, "ranks": [rank]}, {"pg_size": 2, "ranks": [0, 1] if rank < 2 else [2, 3]}]

    found = analyze(gloo_pairs(tracing, tmp_path / "halves", halves))
    assert sorted(sorted(m.members) for m in found.matching.matched) == [[0, 1]] * 4 + [[2, 3]] * 4
    assert found.shifts == {}

    def twice(_rank):
        return [{"pg_size": 4, "ranks": []}, {"pg_size": 4, "ranks": [0, 1, 2, 3]}]

    found = match(views(*gloo_pairs(tracing, tmp_path / "twice", twice)))
    assert [sorted(m.members) for m in found.matched] == [[0, 1, 2, 3]] * 4


def test_no_more_ranks_than_the_group_has(tracing, tmp_path):
    """Collectives of groups of two that nothing tells apart, found on four ranks, are not one."""
    paths = []
    for rank in range(4):
        t = tracing.Trace(rank, world_size=4).step(0, 0, 100).kernel("gemm", 0, 10, launch=1)
        paths.append(t.nccl("allreduce", 10, 20, launch=2, ranks="").write(tmp_path / f"rank_{rank}.json"))
    found = match(views(*paths))
    assert found.matched == []
    assert found.unmatched == {"on more ranks than the group has": 4}


def test_point_to_point_is_not_matched(tracing, tmp_path):
    """Sends and receives have a partner that a trace does not name."""
    paths = [
        tracing.Trace(r)
        .step(0, 0, 100)
        .nccl("send" if r else "recv", 5, 5, launch=1)
        .write(tmp_path / f"rank_{r}.json")
        for r in (0, 1)
    ]
    found = match(views(*paths))
    assert found.matched == []
    assert list(found.unmatched.values()) == [2]


def test_two_traces_of_one_rank(tracing, tmp_path):
    """Two traces of the same rank cannot be analysed together."""
    paths = [tracing.Trace(0).op("aten::mm", 0, 1).write(tmp_path / name) for name in ("a.json", "b.json")]
    with pytest.raises(ConfigError, match=r"a\.json.*b\.json.*rank 0"):
        analyze(paths)


def test_nothing_to_analyse(tmp_path):
    """A trace without work is refused, and the message says how to record one."""
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ConfigError, match="ProfilerActivity"):
        analyze([path])


def test_straggler_on_a_device(tracing, tmp_path):
    """On devices, a rank whose kernels come late for want of data is named by the phase that launched them."""
    paths = []
    for rank, wait in ((0, 0), (1, 300), (2, 0)):
        t = tracing.Trace(rank, world_size=3)
        at = 0
        for number in range(4):
            t.step(number, at, 1000)
            t.mark("dataloader", at, 10 + wait).mark("forward", at + 10 + wait, 100).mark(
                "backward", at + 110 + wait, 100
            )
            t.kernel("copy", at + 20 + wait, 5, launch=at + 5 + wait)
            t.kernel("gemm", at + 25 + wait, 200, launch=at + 20 + wait)
            t.kernel("gemm", at + 225 + wait, 200, launch=at + 120 + wait)
            t.nccl("allreduce", at + 425 + wait, 875 - wait - 425, launch=at + 130 + wait, size=3, ranks="[0, 1, 2]")
            t.kernel("adam", at + 880, 10, launch=at + 870)
            at += 1000
        paths.append(t.write(tmp_path / f"rank_{rank}.json"))
    found = analyze(paths)
    (straggler,) = found.stragglers
    assert (straggler.rank, straggler.phase, straggler.phase_excess) == (1, "data", 300_000)
    assert straggler.compute_excess == 0
    assert judge(found).bound == "straggler-bound"
