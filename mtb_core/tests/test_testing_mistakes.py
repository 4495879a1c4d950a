"""The kit's checks: a strategy with one mistake fails in the check that names it, a right one passes."""

import pytest

from . import kit_strategies as kit

MISTAKES = [
    (kit.Prefixed, "checkpoints.keys", "module."),
    (kit.Flattened, "checkpoints.shapes", "float32 ["),
    (kit.StaleMoments, "checkpoints.optimizer_state", "exp_avg"),
    (kit.Copies, "checkpoints.restored_state", "resuming from step 1"),
    (kit.OwnSchedule, "checkpoints.learning_rate", "resumed from step 1"),
    (kit.SeedsAlike, "checkpoints.random_state", "ranks 0 and 1 agree"),
    (kit.ScalarsForgotten, "checkpoints.restored_state", "scalars {'count': 1}, as saved after step 1"),
    (kit.OwnCopied, "checkpoints.restored_state", "strategy/owncopied/mean"),
    (kit.HiddenState, "checkpoints.exact_resume", "resumed from step 1"),
    (kit.SavesWorld, "checkpoints.resharding", "model/world"),
    (kit.SavesWorld, "checkpoints.interchange", "model/world"),
    (kit.Aliases, "checkpoints.snapshot", "written after step 4"),
    (kit.OtherWhenAsynchronous, "checkpoints.async_agrees", "against the synchronous one"),
    (kit.MarksEarly, "checkpoints.publish_order", "at 'staged'"),
    (kit.ChecksNothing, "checkpoints.incomplete_refused", "changed byte"),
    pytest.param(kit.HiddenState, "checkpoints.crash", "the checkpoint of step", marks=pytest.mark.slow),
    (kit.StepsInBackward, "failures.nonfinite", "stopped step 2"),
    (kit.KeepsGradients, "failures.skipped_update", "skipped [2, 3, 4]"),
    (kit.Swallows, "failures.exception", "ended an exception"),
    (kit.Helper, "failures.killed", "sleep"),
    (kit.OwnHandler, "failures.stop", "done"),
    (kit.LeaksGroup, "processes.groups", "[0, 1]"),
    (kit.LeaksThread, "processes.threads", "prefetch"),
    (kit.LeaksPort, "processes.files", "listening on port"),
    pytest.param(kit.NeedsParent, "processes.spawn", "AssertionError", marks=pytest.mark.slow),
    (kit.OddFacts, "processes.metrics", "tensor"),
    (kit.CallsItself, "processes.overhead", "'gradients': 2"),
]
NAMES = sorted({getattr(mistake, "values", mistake)[1] for mistake in MISTAKES})


@pytest.fixture(scope="module")
def right():
    """The right strategy's laboratory."""
    with kit.lab_of(kit.Right) as lab:
        yield lab


@pytest.mark.slow  # among the fast tests, strategy `ddp` passes every check of the kit
@pytest.mark.parametrize("name", NAMES)
def test_right_strategy_passes(right, name):
    """A right strategy passes every check that is proved below."""
    outcome = kit.outcome_of(right, name)
    assert outcome.status == "passed", outcome.text


@pytest.mark.parametrize(("mistake", "name", "words"), MISTAKES)
def test_mistake_is_named(mistake, name, words):
    """The check fails, and what it says names the place."""
    with kit.lab_of(mistake) as lab:
        outcome = kit.outcome_of(lab, name)
    assert outcome.status == "failed"
    assert words in f"{outcome.expected} {outcome.seen}", outcome.text


@pytest.fixture(scope="module")
def own_state():
    """The laboratory of a right strategy with state of its own."""
    with kit.lab_of(kit.OwnState) as lab:
        yield lab


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints.keys",
        "checkpoints.restored_state",
        "checkpoints.exact_resume",
        "checkpoints.resharding",
        "checkpoints.interchange",
        "models.buffers",
    ],
)
def test_state_of_its_own_is_accepted(own_state, name):
    """Tensors under ``strategy/NAME/`` and scalars pass, also where `single` goes on without them and back."""
    outcome = kit.outcome_of(own_state, name)
    assert outcome.status == "passed", outcome.text
