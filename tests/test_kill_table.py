"""The conformance kit notices each of the mistakes in `broken`, in the check that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from broken.catalogue import Mistake, mistakes

from mtb_core import StrategyInfo
from mtb_kit.checking import Outcome, cases, run_case
from mtb_kit.lab import Lab

#: Of each group some that take a second at most; all others are slow.
FAST = {
    "plan-not-pure",
    "misspelt-hook",
    "sync-around-backward-only",
    "not-restored-after-exception",
    "divided-twice",
    "norm-of-one-shard",
    "clipped-per-micro-batch",
    "weights-per-rank",
    "forgotten-zero-grad",
    "frozen-updated",
    "buffers-not-synchronised",
    "optimizer-not-saved",
    "ready-first",
    "updated-in-backward",
    "averaged-twice",
    "buffers-added",
    "wrong-stage-counts",
    "positions-overlap",
    "keys-and-values-not-summed",
    "auxiliary-loss-by-ranks",
    "claims-applied",
    "rank-left-out",
    "data-not-set-back",
    "parts-mixed-up",
    "numbers-forgotten",
    "parameters-of-one-stage",
    "leaked-thread",
    "exceptions-swallowed",
}


class Labs:
    """Laboratories of the right strategies, so that what they have run is shared."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._labs: dict[tuple[StrategyInfo, tuple[int, ...]], Lab] = {}

    def of(self, info: StrategyInfo, world_sizes: tuple[int, ...]) -> Lab:
        if (info, world_sizes) not in self._labs:
            self._labs[info, world_sizes] = self._stack.enter_context(Lab(info, world_sizes=world_sizes))
        return self._labs[info, world_sizes]


@pytest.fixture(scope="module")
def right() -> Iterator[Labs]:
    with ExitStack() as stack:
        yield Labs(stack)


def lab_of(mistake: Mistake) -> Lab:
    return Lab(mistake.info, capabilities=mistake.capabilities, world_sizes=mistake.world_sizes, standing=False)


def named(mistake: Mistake, lab: Lab) -> Outcome:
    """The check that names the mistake, run alone."""
    (case,) = cases((mistake.ranks,), [mistake.check])
    return run_case(lab, case)


def test_every_mistake_is_listed() -> None:
    """There are enough of them, each says what it is, and the fast ones exist."""
    listed = mistakes()
    assert len(listed) >= 115
    assert all(mistake.info.help for mistake in listed)
    assert {mistake.name for mistake in listed} >= FAST


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(m, id=m.name, marks=[] if m.name in FAST else [pytest.mark.slow]) for m in mistakes()],
)
def test_mistake_is_noticed(mistake: Mistake, right: Labs) -> None:
    """The check that names the mistake fails, with an explanation, and passes for the strategy without it."""
    with lab_of(mistake) as lab:
        outcome = named(mistake, lab)
    assert outcome.status == "failed", outcome.case
    assert outcome.expected
    assert outcome.seen
    same = named(mistake, right.of(mistake.right, mistake.world_sizes))
    assert same.status == "passed" or (same.status == "skipped" and "not promised" in same.reason), same.text
