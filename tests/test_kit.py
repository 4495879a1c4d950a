"""The conformance kit itself: right strategies pass, cases are chosen, hangs end, states are put together."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import plans
from broken.catalogue import GATHERING, REPLICATED, SHARDED

from mtb_core import ConfigError, Layout, Plan, StrategyInfo, TrainConfig, World
from mtb_core.registry.discovery import discover
from mtb_core.testing import Capabilities, StrategyConformance
from mtb_core.testing import lab as laboratory
from mtb_core.testing.certificate import Certificate
from mtb_core.testing.checking import Outcome, all_checks, cases, run_case
from mtb_core.testing.checks.processes import watched
from mtb_core.testing.episodes import episode
from mtb_core.testing.lab import Lab
from mtb_core.testing.probes_processes import Leftovers
from mtb_core.testing.stage import RankTrace
from mtb_core.testing.states import Mismatch, assemble, equal_bitwise, equal_within


@pytest.mark.slow
class TestReplicated(StrategyConformance):
    strategy = REPLICATED


@pytest.mark.slow
class TestSharded(StrategyConformance):
    strategy = SHARDED


@pytest.mark.slow
class TestGathering(StrategyConformance):
    strategy = GATHERING
    capabilities = Capabilities(world_sizes=(2,))


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
        "from mtb_core.testing import Capabilities, StrategyConformance\n"
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


@pytest.mark.parametrize(
    "name", ["exact", "accumulation", "clipping", "bf16", "tied_weights", "exact_resume", "resharding"]
)
def test_undeclared_is_skipped(name: str) -> None:
    """What the author leaves out is skipped, and the reason says so."""
    with Lab(REPLICATED, capabilities=Capabilities(world_sizes=(2,), **{name: False})) as lab:
        needing = [case for case in cases((2,)) if name in case.check.needs]
        assert needing
        for case in needing:
            outcome = run_case(lab, case)
            assert (outcome.status, outcome.reason) == ("skipped", f"not promised: {name}")


def fp32_only(options: object, config: TrainConfig, world: World) -> Plan:
    return Plan(Layout((("dp", world.size),)), bf16=False)


def test_declared_but_not_so() -> None:
    """A promise on which the author insists, and which the plan does not make, fails by its name."""
    info = StrategyInfo("no-bf16", "Promises fp32 only", "broken.right:Replicated", fp32_only)
    (case,) = cases((2,), ["discovery.capabilities"])
    with Lab(info, capabilities=Capabilities(world_sizes=(2,), bf16=True)) as lab:
        outcome = run_case(lab, case)
        assert outcome.status == "failed"
        assert "bf16" in outcome.text
    with Lab(info, capabilities=Capabilities(world_sizes=(2,))) as lab:
        assert run_case(lab, case).status == "passed"


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
