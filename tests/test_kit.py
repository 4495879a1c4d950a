"""The conformance kit itself: right strategies pass, cases are chosen, hangs end, states are put together."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed.tensor  # its caches are looked through
from broken import plans
from broken.catalogue import GATHERING, LOCAL_STEPS, MIRRORED, OWN_STATE, POSITIONS, REPLICATED, SHARDED, STAGES, ZERO1

from mtb_core import ConfigError, Plan, StrategyInfo, hookimpl
from mtb_core.registry.discovery import discover
from mtb_kit import ESSENTIAL, NUMBERS, Capabilities, StrategyConformance
from mtb_kit import lab as laboratory
from mtb_kit.capabilities import PROMISES
from mtb_kit.certificate import Certificate
from mtb_kit.checking import Outcome, all_checks, cases, run_case
from mtb_kit.checks.processes import watched
from mtb_kit.episodes import Probe, episode
from mtb_kit.lab import Lab, Run
from mtb_kit.probes_processes import Leftovers
from mtb_kit.stage import RankTrace
from mtb_kit.states import Mismatch, assemble, equal_bitwise, equal_within


@pytest.mark.slow
class TestReplicated(StrategyConformance):
    strategy = REPLICATED
    capabilities = Capabilities(world_sizes=(2,))


@pytest.mark.slow
class TestSharded(StrategyConformance):
    strategy = SHARDED
    capabilities = Capabilities(world_sizes=(3,))


@pytest.mark.slow
class TestOwnState(StrategyConformance):
    """Tensors under ``strategy/NAME/`` and numbers pass, also where `single` goes on without them and back."""

    strategy = OWN_STATE
    capabilities = Capabilities(world_sizes=(2,))
    only = NUMBERS


@pytest.mark.slow
class TestGathering(StrategyConformance):
    strategy = GATHERING
    capabilities = Capabilities(world_sizes=(2,))
    only = NUMBERS


@pytest.mark.slow
class TestStages(StrategyConformance):
    strategy = STAGES
    capabilities = Capabilities(world_sizes=(2,))


@pytest.mark.slow
class TestPositions(StrategyConformance):
    strategy = POSITIONS
    capabilities = Capabilities(world_sizes=(2,))


@pytest.mark.slow
class TestLocalSteps(StrategyConformance):
    """Replicas that agree every second step only, which is not what `single` trains."""

    strategy = LOCAL_STEPS
    capabilities = Capabilities(world_sizes=(2,))


@attrs.frozen
class ProcessNumber(Probe):
    """Notes which process the rank is."""

    def observer(self, stage):
        stage.trace.notes["process"] = os.getpid()
        return Idle()


@attrs.frozen
class FailsAtStart(Probe):
    """Raises before the first step."""

    def observer(self, stage):
        return DividesByZero()


class Idle:
    @hookimpl
    def mtb_run_finished(self):
        pass


class DividesByZero:
    @hookimpl
    def mtb_run_started(self):
        raise ZeroDivisionError("on purpose")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(SHARDED, world_sizes=(2,)) as lab:
        yield lab


@pytest.mark.parametrize(
    "name",
    ["discovery.plan", "parity.weights", "parity.grad_norm", "sync.count", "models.odd_dimensions", "checkpoints.keys"],
)
def test_right_strategy_passes(lab: Lab, name: str) -> None:
    """One check of each group; the complete kit is for the slow tests."""
    (case,) = cases((2,), [name])
    outcome = run_case(lab, case)
    assert outcome.status == "passed", outcome.text


@pytest.mark.parametrize("name", ["sync.count", "sync.volume", "parity.reduce_dtype"])
def test_unknown_reduction_is_skipped(name: str) -> None:
    """Where gradients are right but nothing that is known to sum was seen, the check says so and judges nothing."""
    with Lab(GATHERING, world_sizes=(2,)) as lab:
        (case,) = cases((2,), [name])
        outcome = run_case(lab, case)
    assert outcome.status == "skipped", outcome.text
    assert outcome.reason.startswith("no known reduction seen (all_reduce, reduce_scatter, reduce)")


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 2)])
def test_world_sizes_are_numbers_of_ranks(sizes: tuple[int, ...]) -> None:
    """None, less than one, and the same twice are refused where they are declared."""
    with pytest.raises(ConfigError, match="at least one of them, each at least 1 and named once"):
        Capabilities(world_sizes=sizes)


def test_strict_markers_without_pytest_timeout(tmp_path: Path) -> None:
    """A plugin's tests can be collected with --strict-markers where pytest-timeout is not installed."""
    (tmp_path / "test_mine.py").write_text(
        "from mtb_kit import Capabilities, StrategyConformance\n"
        "class TestMine(StrategyConformance):\n"
        "    strategy = 'single'\n"
        "    capabilities = Capabilities(world_sizes=(1,))\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:timeout", "--strict-markers", "--collect-only", "-q", "."]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "test_conformance[parity.losses@1]" in ran.stdout


def test_checks_are_told_apart() -> None:
    """Each has a name of its own in a group, and says what must hold and what was probably done wrong."""
    checks = all_checks()
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.name.count(".") == 1
        assert check.title.endswith(".")
        assert check.mistake


def test_cases_by_world_size() -> None:
    """A check is run at all sizes, at those above one, at the smallest of those, or at the largest only."""
    found = {case.name for case in cases((1, 2, 3))}
    assert {"parity.weights@1", "parity.weights@2", "parity.weights@3"} <= found
    assert "sync.count@1" not in found
    assert {"sync.count@2", "sync.count@3"} <= found
    assert [name for name in found if name.startswith("processes.spawn")] == ["processes.spawn@2"]
    assert [name for name in found if name.startswith("discovery.hooks")] == ["discovery.hooks@3"]


def test_selections_name_checks() -> None:
    """Each of their patterns names some; what runs often is a part of every group."""
    names = {case.check.name for case in cases((2,), ESSENTIAL)}
    assert {name.partition(".")[0] for name in names} == {check.name.partition(".")[0] for check in all_checks()}
    assert len(names) < len(cases((2,), NUMBERS)) < len(all_checks())


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["parity.weights@2"], ["parity.weights@2"]),
        (["sync"], ["sync.count@2", "sync.volume@2", "sync.gradients@2", "sync.restored@2"]),
        (["sync.*ed", "*.weights"], ["parity.weights@1", "parity.weights@2", "sync.restored@2"]),
    ],
)
def test_patterns(patterns: list[str], expected: list[str]) -> None:
    """A pattern is a group, a check, or a case, with ``*``."""
    assert [case.name for case in cases((1, 2), patterns)] == expected


def test_pattern_without_match() -> None:
    """It is refused, with what is nearest."""
    with pytest.raises(ConfigError, match=r"'parity\.weigths'.*Did you mean 'parity\.weights'"):
        cases((1, 2), ["parity.weigths"])


@pytest.mark.parametrize("name", [p for p in PROMISES if any(p in case.check.needs for case in cases((2,)))])
def test_what_is_left_out_is_skipped(name: str) -> None:
    """A promise that the author leaves out is not checked, and the reason says so."""
    with Lab(REPLICATED, capabilities=Capabilities(world_sizes=(2,), **{name: False})) as lab:
        for case in [case for case in cases((2,)) if name in case.check.needs]:
            outcome = run_case(lab, case)
            assert (outcome.status, outcome.reason.startswith("not promised: ")) == ("skipped", True)
            assert name in outcome.reason


def test_promises_are_those_of_plans() -> None:
    """Nothing is declared under a name of its own; every need of a check is a promise."""
    assert set(PROMISES) <= {field.name for field in attrs.fields(Plan)}
    assert {need for check in all_checks() for need in check.needs} <= set(PROMISES)


def test_promises_follow_the_plan() -> None:
    """What the plan says at a number of ranks is checked there, without any declaration."""
    with Lab(LOCAL_STEPS, world_sizes=(1, 2)) as lab:
        assert lab.promised(2) == {
            **dict.fromkeys(PROMISES, True),
            **dict.fromkeys(("sums_gradients", "exact", "sharded", "resharding"), False),
        }
    with Lab(ZERO1, world_sizes=(2,)) as lab:
        assert lab.promises("sharded", 2)


def test_insisting_on_what_the_plan_lacks_fails() -> None:
    """An author who insists on a promise learns that the plan does not make it."""
    declared = Capabilities(world_sizes=(1, 2), sharded=True)
    with Lab(REPLICATED, capabilities=declared) as lab:
        outcomes = {n: run_case(lab, case) for n in (1, 2) for case in cases((n,), ["discovery.capabilities"])}
    assert {n: outcome.status for n, outcome in outcomes.items()} == {1: "passed", 2: "failed"}
    assert outcomes[2].seen == "the plan for 2 ranks says False"


def test_plan_that_refuses_what_it_promises() -> None:
    """The plan's own refusal is shown, and nothing is checked with it."""
    info = StrategyInfo("no-bf16", "Refuses bf16", "broken.right:Replicated", plans.without_bf16)
    with Lab(info, world_sizes=(2,)) as lab:
        (case,) = cases((2,), ["discovery.promises"])
        outcome = run_case(lab, case)
        assert outcome.status == "failed"
        assert "fp32 only" in outcome.seen
        assert not lab.promises("bf16", 2)


def test_episodes_have_the_micro_batches_that_the_plan_needs() -> None:
    """At least as many as there are stages, as far as the global batch can be shared out; the reference has its own."""
    with Lab(STAGES, world_sizes=(2, 3, 5)) as lab:
        assert [lab.micro_batches(2, n) for n in (1, 2, 4, 5)] == [2, 2, 4, 6]
        assert lab.config(episode(3)).grad_accum_steps == 3
        assert lab.config(episode(5, grad_accum_steps=1)).grad_accum_steps == 6
        assert lab.config(episode(1, subject=False, grad_accum_steps=1)).grad_accum_steps == 1


def test_declaration_without_a_plan_is_the_likely_mistake() -> None:
    """A check that needs a plan which is refused says what is wrong with the declaration, not what it looks for."""
    info = StrategyInfo("last-only", "Sums after the last micro-batch", "broken.right:Replicated", plans.last_only)
    with Lab(info, capabilities=Capabilities(world_sizes=(2,), sync_modes=("every", "last"))) as lab:
        outcomes = [run_case(lab, case) for case in cases((2,), ["discovery.capabilities", "sync.count"])]
    assert [outcome.status for outcome in outcomes] == ["failed", "failed"]
    (mistake,) = {outcome.mistake for outcome in outcomes}
    assert mistake == outcomes[0].case.check.mistake
    assert f"likely mistake: {mistake}\n" in outcomes[1].text
    assert {row["mistake"] for row in Certificate(lab, outcomes).as_json()["checks"]} == {mistake}


def test_failure_tells_how_it_was_looked_at() -> None:
    """What a failure prints is complete: it names no page that an installed package lacks."""
    (by_steps,) = cases((2,), ["processes.threads"])
    (by_title,) = cases((2,), ["parity.losses"])
    assert Outcome(by_steps, "failed").text.endswith(f"\n  how:            {by_steps.check.how}")
    assert "how:" not in Outcome(by_title, "failed").text
    assert not any("docs/" in Outcome(case, "failed").text for case in cases((2,)))


def test_ranks_compute_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several cores are a rank's own, no pool of torch's starts within the run and looks like the strategy's."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Lab(discover().strategy("single"), world_sizes=(1,)) as lab:
        (case,) = cases((1,), ["processes.threads"])
        outcome = run_case(lab, case)
        assert outcome.status == "passed", outcome.text
        assert watched(lab, 1).result["environment"]["torch_threads"] == 1


def test_threads_of_the_first_backward_are_not_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With GPUs, torch starts threads at a process's first backward, to stay; they are there before the count."""
    backward, over, started = torch.autograd.backward, threading.Event(), []

    def first_starts_a_thread(*arguments: Any, **settings: Any) -> None:
        if not started:
            started.append(threading.Thread(target=over.wait, name="pt_autograd_0"))
            started[0].start()
        backward(*arguments, **settings)

    monkeypatch.setattr(torch.autograd, "backward", first_starts_a_thread)
    trace = RankTrace(0)
    with Leftovers().around(trace):
        torch.ones(1, requires_grad=True).sum().backward()
    over.set()
    started[0].join()
    assert trace.notes["threads"] == {}


@pytest.mark.slow
def test_spawned_ranks_leave_no_group() -> None:
    """Modules of torch that a spawned rank imports late must not hold the run's group: that is not the strategy's doing."""
    with Lab(discover().strategy("fsdp"), world_sizes=(2,)) as lab:
        run = lab.done(episode(2, steps=1, start_method="spawn", probes=(Leftovers(),)))
    assert [(trace.notes["threads"], trace.notes["files"]) for trace in run.traces.values()] == [({}, {})] * 2


class Ring:
    """Refers to itself, so that it waits for the garbage collector, and notes in which process that comes."""

    def __init__(self, folder: Path) -> None:
        self.itself, self.folder = self, folder

    def __del__(self) -> None:
        (self.folder / str(os.getpid())).touch()


#: Objects of the laboratory's process; its forked ranks inherit them.
rings: list[Ring] = []


@attrs.frozen
class Forgets(Probe):
    """Lets go of what the rank has inherited."""

    def observer(self, stage):
        rings.clear()
        return Idle()


def test_ranks_free_nothing_that_they_have_inherited(tmp_path: Path) -> None:
    """A process group of the laboratory's would wait for ever, where a forked rank frees it, for threads not there."""
    rings.append(Ring(tmp_path))
    with Lab(REPLICATED, world_sizes=(2,)) as lab:
        lab.done(episode(2, steps=1, probes=(Forgets(), Leftovers())))
    rings.clear()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_infinity_of_one_copy_stops_all_ranks() -> None:
    """Ranks that compute alike and sum nothing agree on a gradient that is not finite on one of them."""
    with Lab(MIRRORED, world_sizes=(2,)) as lab:
        (case,) = cases((2,), ["failures.nonfinite_gradient"])
        outcome = run_case(lab, case)
    assert outcome.status == "passed", outcome.text


def test_hang_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode that does not come to its end is ended, and shows where it hangs."""
    monkeypatch.setattr(laboratory, "DEADLINE_S", 8.0)
    info = StrategyInfo("hangs", "Hangs", "broken.lifecycle:Hangs", plans.data_parallel)
    with Lab(info, world_sizes=(2,)) as lab:
        with pytest.raises(Mismatch, match="comes to its end"):
            lab.done(episode(2))
        run = lab.run(episode(2))
        assert run.exit_reason == "failed"
        assert any("_wait_for_ever" in line for lines in run.log.values() for line in lines), run.why()


def test_episode_runs_once(lab: Lab) -> None:
    """Equal episodes are one run."""
    assert lab.done(episode(2, steps=1)) is lab.done(episode(2, steps=1))


def process_numbers(run: Run) -> list[int]:
    return [trace.notes["process"] for trace in run.traces.values()]


def test_ranks_run_one_episode_after_the_other() -> None:
    """The same processes, but for episodes that ask for fresh ones; an episode that fails on a rank ends them."""
    one, two = (episode(2, steps=1, seed=seed, probes=(ProcessNumber(),)) for seed in (1, 2))
    with Lab(REPLICATED, world_sizes=(2,)) as lab:
        first = process_numbers(lab.done(one))
        assert process_numbers(lab.done(two)) == first
        fresh = process_numbers(lab.done(episode(2, steps=1, seed=3, probes=(ProcessNumber(),), fresh=True)))
        assert not set(fresh) & set(first)
        failing = lab.run(episode(2, steps=1, seed=4, probes=(FailsAtStart(),)))
        assert (failing.exit_reason, failing.failure.kind) == ("failed", "ZeroDivisionError")
        assert "Traceback" not in failing.why()
        after = process_numbers(lab.done(episode(2, steps=1, seed=5, probes=(ProcessNumber(),))))
        assert not set(after) & set(first)
        with Lab(REPLICATED, world_sizes=(2,), standing=False) as other:
            alone = [process_numbers(other.done(asked)) for asked in (one, two)]
        assert not set(alone[0]) & set(alone[1])
    assert not [number for number in (*first, *after) if Path(f"/proc/{number}").exists()]


def test_episodes_on_standing_ranks_give_the_same_bits() -> None:
    """What an episode gives does not depend on those that its processes have run before."""
    asked = episode(2, dropout=0.2, states=(0, 4))
    with Lab(SHARDED, world_sizes=(2,)) as lab:
        lab.done(episode(2, model="kit-buffers", steps=2))
        after = lab.done(asked)
        with Lab(SHARDED, world_sizes=(2,), standing=False) as other:
            alone = other.done(asked)
    for step in (0, 4):
        equal_bitwise(after.whole(step), alone.whole(step), "the state")
    assert after.first.losses == alone.first.losses


def test_failures_are_those_of_fresh_ranks() -> None:
    """What fails on ranks that have run other episodes is repeated without them; a figure tells that it had failed."""
    info = StrategyInfo(
        "twice", "Fails in the second run of a process", "broken.lifecycle:OncePerProcess", plans.stages
    )
    chosen = cases((2,), ["parity.initial_weights", "parity.losses"])
    with Lab(info, world_sizes=(2,)) as lab:
        lab.done(episode(2, steps=1))
        outcomes = [run_case(lab, case) for case in chosen]
    assert [outcome.status for outcome in outcomes] == ["passed", "passed"]
    assert "it can run once" in outcomes[0].figures["failed_at_first"]


def traces(*held: dict[str, list]) -> dict[int, RankTrace]:
    return {rank: RankTrace(rank, states={1: parts}) for rank, parts in enumerate(held)}


ROWS = torch.arange(6.0).view(3, 2)


def test_assemble() -> None:
    """Parts of several ranks become the whole; what several hold is compared bit for bit, NaN too."""
    nan = torch.full((2,), float("nan"))
    whole = assemble(
        traces(
            {"w": [(ROWS[:2], (3, 2), (0, 0))], "s": [(torch.tensor(2.0), (), ())], "n": [(nan, (2,), (0,))]},
            {"w": [(ROWS[1:], (3, 2), (1, 0))], "s": [(torch.tensor(2.0), (), ())], "n": [(nan, (2,), (0,))]},
        ),
        1,
    )
    assert torch.equal(whole["w"], ROWS)
    assert float(whole["s"]) == 2.0
    assert bool(whole["n"].isnan().all())


@pytest.mark.parametrize(
    ("second", "seen"),
    [
        ([(ROWS[1:] + 1, (3, 2), (1, 0))], "ranks 0 and 1 differ by up to 1"),
        ([(ROWS[2:, :1], (3, 2), (2, 0))], "1 elements are on none"),
        ([], "2 elements are on none"),
        ([(ROWS[1:], (3, 2), (2, 0))], "rank 1 has one of shape [2, 2] at [2, 0]"),
        ([(ROWS[1:], (4, 2), (1, 0))], "shapes [(3, 2), (4, 2)]"),
    ],
    ids=["overlap", "gap-in-row", "row-missing", "outside", "shape"],
)
def test_assemble_refuses(second: list, seen: str) -> None:
    """Ranks that disagree, elements that nobody holds, and parts that do not fit."""
    with pytest.raises(Mismatch) as raised:
        assemble(traces({"w": [(ROWS[:2], (3, 2), (0, 0))]}, {"w": second} if second else {}), 1)
    assert seen in raised.value.seen


def test_assemble_needs_the_step() -> None:
    """A rank that did not get to the step is named."""
    with pytest.raises(Mismatch, match="rank 0 after step 2"):
        assemble(traces({"w": [(ROWS, (3, 2), (0, 0))]}), 2)


def test_comparisons() -> None:
    """One bit is noticed; so are keys, shapes and a factor, which is named."""
    close = ROWS.clone()
    close[2, 1] = torch.nextafter(close[2, 1], torch.tensor(9.0))
    equal_bitwise({"w": ROWS}, {"w": ROWS.clone()}, "it")
    with pytest.raises(Mismatch, match="the same bits in 'w'"):
        equal_bitwise({"w": close}, {"w": ROWS}, "it")
    assert equal_within({"w": close}, {"w": ROWS}, 1e-6, "it") > 0
    with pytest.raises(Mismatch, match=r"it is 0\.5 times what it should be"):
        equal_within({"w": ROWS / 2}, {"w": ROWS}, 1e-6, "it")
    with pytest.raises(Mismatch, match=r"1 missing \(w"):
        equal_within({}, {"w": ROWS}, 1e-6, "it")
    with pytest.raises(Mismatch, match="of shape"):
        equal_within({"w": ROWS[:2]}, {"w": ROWS}, 1e-6, "it")
