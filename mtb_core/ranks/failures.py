"""Failures of ranks, and the choice of the first cause among several.

When one rank fails, the others soon fail too: their connections close. Such failures are *secondary*. A rank that
fails writes why into the run's store before it leaves, so that a rank that is left with a broken connection, also on
another node, can name the first cause instead of its own.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from mtb_core.api.errors import MtbError, RunFailed

if TYPE_CHECKING:
    from torch.distributed import Store

_COUNT = "failures/count"

#: Errors that communication raises when a peer is gone: classes by name, so that torch need not be imported.
_NETWORK_ERRORS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_NETWORK_PHRASES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo/transport",
    "gloo connect",
    "connectfullmesh",
    "unbound_buffer",
    "remote process exited",
    "socket timeout",
    "timed out waiting",
)


@attrs.frozen
class Failure:
    """Failure of one rank.

    Attributes:
        rank: global rank where the cause lies; None where it is no single rank's: all of them, or the launcher itself.
        kind: name of the exception's class, ``"signal SIGKILL"`` or ``"exit code 5"``.
        message: of the exception, or what was seen.
        step: optimizer step, where it is known.
        traceback: as text; empty where there is none.
        time: seconds since the epoch, on the clock of the failing rank's machine.
        secondary: probably only a consequence of another rank's failure.
        agreed: all ranks failed together, for the same reason.
        expected: the message is meant for people (`MtbError`); a traceback would add nothing.
    """

    rank: int | None
    kind: str
    message: str
    step: int | None = None
    traceback: str = ""
    time: float = attrs.field(factory=time.time)
    secondary: bool = False
    expected: bool = False
    agreed: bool = False

    def __str__(self) -> str:
        """One line or paragraph for people."""
        nobody = "All ranks" if self.agreed else "The launcher"
        where = nobody if self.rank is None else f"Rank {self.rank}"
        at = "" if self.step is None else f" at step {self.step}"
        if self.kind.startswith("signal "):
            return f"{where} died by {self.kind.removeprefix('signal ')}{at}. {self.message}".rstrip()
        if self.kind.startswith("exit code "):
            return f"{where} left with {self.kind}{at}. {self.message}".rstrip()
        if self.expected:
            return f"{where} failed{at}: {self.message}"
        return f"{where} failed{at}: {self.kind}: {self.message}"


class PeerFailed(RunFailed):
    """This rank lost its peers because another one failed; `failure` is the first cause."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure), rank=failure.rank, step=failure.step)
        self.failure = failure


def failure_of(error: BaseException, rank: int) -> Failure:
    """The failure that `error`, raised on `rank`, stands for."""
    if isinstance(error, PeerFailed):
        return error.failure
    if isinstance(error, SystemExit):
        return Failure(rank, f"exit code {_exit_code(error)}", "It called sys.exit().", traceback=_text(error))
    agreed = getattr(error, "agreed", False)
    named = getattr(error, "rank", None)
    return Failure(
        rank=rank if named is None and not agreed else named,
        kind=type(error).__name__,
        message=str(error),
        step=getattr(error, "step", None),
        traceback=_text(error),
        secondary=_lost_peer(error),
        expected=isinstance(error, MtbError),
        agreed=agreed,
    )


def exit_failure(rank: int, code: int) -> Failure:
    """The failure of a process that said nothing and left with `code` (negative: number of the signal)."""
    if code >= 0:
        return Failure(rank, f"exit code {code}", "It left without reporting an error or a result.")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = " The system may have run out of memory." if name == "SIGKILL" else ""
    return Failure(rank, f"signal {name}", "Its log may tell more." + hint)


def first_cause(failures: Iterable[Failure]) -> Failure | None:
    """The earliest failure that is not secondary; only if all are, the earliest of them."""
    return min(failures, key=lambda f: (f.secondary, f.time), default=None)


def record_failure(store: Store | None, failure: Failure) -> None:
    """Leave `failure` where other ranks can find it. Never raises: it is called while something else is wrong."""
    if store is None:
        return
    try:
        index = store.add(_COUNT, 1)
        store.set(f"failures/{index}", json.dumps(attrs.asdict(failure)))
    except Exception:  # noqa: BLE001, S110  (the store may be gone with the rank that hosted it)
        pass


def recorded_cause(store: Store | None, *, patience_s: float = 1.0) -> Failure | None:
    """The first cause that some rank has recorded, waited for up to `patience_s`; None if there is none."""
    deadline = time.monotonic() + patience_s
    while store is not None:
        try:
            found = _recorded(store)
        except Exception:  # noqa: BLE001  (as above)
            return None
        cause = first_cause(f for f in found if not f.secondary)
        if cause is not None or time.monotonic() > deadline:
            return cause
        time.sleep(0.05)
    return None


def _recorded(store: Store) -> list[Failure]:
    keys = [f"failures/{index + 1}" for index in range(store.add(_COUNT, 0))]
    return [Failure(**json.loads(store.get(key))) for key in keys if store.check([key])]


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _lost_peer(error: BaseException) -> bool:
    if any(cls.__name__ in _NETWORK_ERRORS for cls in type(error).__mro__):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | ConnectionError) and any(phrase in text for phrase in _NETWORK_PHRASES)
