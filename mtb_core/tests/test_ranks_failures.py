import json

import pytest
import torch.distributed as dist

from mtb_core.api import ConfigError, NonFinite
from mtb_core.ranks.failures import (
    Failure,
    PeerFailed,
    exit_failure,
    failure_of,
    first_cause,
    record_failure,
    recorded_cause,
)


def raised(error):
    """`error` with a traceback."""
    with pytest.raises(type(error)) as info:
        raise error
    return info.value


def test_failure_of_an_exception():
    """A failure holds the kind, the message and the traceback of what was raised."""
    failure = failure_of(raised(ValueError("boom")), 3)
    assert (failure.rank, failure.kind, failure.message, failure.step) == (3, "ValueError", "boom", None)
    assert "Traceback" in failure.traceback
    assert (failure.secondary, failure.expected) == (False, False)
    assert str(failure) == "Rank 3 failed: ValueError: boom"


def test_failure_names_the_rank_and_step_that_the_error_names():
    """An error that was agreed on names its own rank and step, on whichever rank it is raised."""
    failure = failure_of(NonFinite("Loss is not finite.", rank=1, step=7), 0)
    assert (failure.rank, failure.step, failure.expected) == (1, 7, True)
    assert str(failure) == "Rank 1 failed at step 7: Loss is not finite."


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1234"),
        dist.DistBackendError("NCCL error: remote process exited"),
        ConnectionResetError("Connection reset by peer"),
    ],
)
def test_lost_connections_are_secondary(error):
    """What communication raises when a peer is gone counts as a consequence."""
    assert failure_of(error, 0).secondary


@pytest.mark.parametrize("error", [ValueError("Connection closed by peer"), RuntimeError("shape mismatch")])
def test_other_errors_are_primary(error):
    """Any other error counts as a cause."""
    assert not failure_of(error, 0).secondary


@pytest.mark.parametrize(
    ("code", "kind"), [(5, "exit code 5"), (0, "exit code 0"), (-11, "signal SIGSEGV"), (-200, "signal 200")]
)
def test_exit_codes(code, kind):
    """A process that said nothing is described by its exit code or signal."""
    assert exit_failure(1, code).kind == kind


@pytest.mark.parametrize(("code", "kind"), [(3, "exit code 3"), ("text", "exit code 1"), (None, "exit code 0")])
def test_sys_exit(code, kind):
    """sys.exit() is described by the exit code it asks for."""
    assert failure_of(SystemExit(code), 1).kind == kind


def test_first_cause_is_the_earliest_primary():
    """A later cause wins over an earlier consequence; among equals the earliest counts."""
    lost = Failure(0, "RuntimeError", "lost", time=1.0, secondary=True)
    early, late = Failure(1, "A", "a", time=2.0), Failure(2, "B", "b", time=3.0)
    assert first_cause([lost, late, early]) is early
    assert first_cause([lost]) is lost
    assert first_cause([]) is None


def test_failures_travel_through_the_store():
    """A recorded failure is found by others, consequences are passed over."""
    store = dist.HashStore()
    assert recorded_cause(store, patience_s=0) is None
    record_failure(store, Failure(0, "RuntimeError", "lost", secondary=True))
    assert recorded_cause(store, patience_s=0) is None
    cause = failure_of(raised(ValueError("boom")), 1)
    record_failure(store, cause)
    assert recorded_cause(store, patience_s=0) == cause
    assert failure_of(PeerFailed(cause), 0) == cause


def test_recording_never_raises():
    """Without a store, or with one that is gone, recording and asking do nothing."""

    class Gone:
        def add(self, *_):
            raise ConnectionError

    for store in (None, Gone()):
        record_failure(store, Failure(0, "A", "a"))
        assert recorded_cause(store, patience_s=0) is None


def test_failure_is_json():
    """Every field can be written as JSON (the report may leave this machine)."""
    import attrs

    failure = failure_of(ConfigError("x"), 0)
    assert Failure(**json.loads(json.dumps(attrs.asdict(failure)))) == failure
