"""The kit's checks of failures: a strategy with one mistake fails in the check that names it, a right one passes."""

import pytest

from . import kit_strategies as kit

MISTAKES = [
    (kit.StepsInBackward, "failures.nonfinite", "stopped step 2"),
    (kit.KeepsGradients, "failures.skipped_update", "skipped [2, 3, 4]"),
    (kit.Swallows, "failures.exception", "UnboundLocalError"),
    (kit.Helper, "failures.killed", "sleep"),
    (kit.OwnHandler, "failures.stop", "done"),
]


@pytest.fixture(scope="module")
def right():
    """The right strategy's laboratory."""
    with kit.lab_of(kit.Right) as lab:
        yield lab


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", sorted({name for _, name, _ in MISTAKES}))
def test_right_strategy_passes(right, name):
    """A right strategy passes every check that is proved below."""
    outcome = kit.outcome_of(right, name)
    assert outcome.status == "passed", outcome.text


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("mistake", "name", "words"), MISTAKES)
def test_mistake_is_named(mistake, name, words):
    """The check fails, and what it says names the place."""
    with kit.lab_of(mistake) as lab:
        outcome = kit.outcome_of(lab, name)
    assert outcome.status == "failed"
    assert words in f"{outcome.expected} {outcome.seen}", outcome.text
