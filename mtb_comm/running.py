"""From a request to a communication document: ranks are started, watched, and their rows kept whatever happens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from mtb_core import ConfigError, Failure, external_launcher, run_ranks
from mtb_evidence import environment

from .bench import Tamper, Work, measure
from .document import make_document
from .kept import cause_of, kept_file, read_kept, warned
from .memory import refuse_too_large
from .points import CommRequest, group_ranks, plan_points, ranks_of

#: Lines of progress are at least so far apart, but for the last one.
_PACE_S = 0.5


class Progress:
    """One line on stderr for a finished row, now and then."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._last = 0.0

    def __call__(self, fields: Mapping[str, Any]) -> None:
        """Take a message of a rank in."""
        if warned(fields) or self._quiet or fields.get("event") != "row":
            return
        now, last = time.monotonic(), fields["index"] + 1 == fields["count"]
        if last or now - self._last >= _PACE_S:
            self._last = now
            print(f"[{fields['index'] + 1}/{fields['count']}] {fields['text']}", file=sys.stderr, flush=True)  # noqa: T201


def measure_all(
    request: CommRequest,
    *,
    nproc: int = 1,
    device: str = "auto",
    backend: str = "auto",
    timeout_s: float | None = None,
    quiet: bool = False,
    debug: bool = False,
    argv: Sequence[str] = (),
    keep: Callable[[dict[str, Any]], object] | None = None,
    tamper: Tamper | None = None,
) -> dict[str, Any] | None:
    """Measure on `nproc` ranks, or as one rank under torchrun; the document, None on external ranks but the first.

    A run that fails or is interrupted after ranks started gives a document too, with the rows that were finished.

    Args:
        timeout_s: of a collective; None is torch's default.
        keep: is given the document before an error of external ranks goes on to their launcher.
        tamper: see `mtb_comm.bench.Work`.

    Raises:
        ConfigError: nothing was started; the message says what would be valid.
    """
    _refuse_early(request, nproc, device, backend)
    with kept_file() as journal:
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        work = Work(request, journal, tamper)
        progress = Progress(quiet=quiet)
        try:
            outcome = run_ranks(
                measure,
                work,
                nproc=nproc,
                device=device,
                backend=backend,
                timeout=timeout,
                on_progress=progress,
                debug=debug,
            )
        except ConfigError:
            raise
        except BaseException as error:
            # Only external ranks, and a lone one at a second Ctrl-C, get here: `run_ranks` passes their errors on.
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            document = _from_journal(request, journal, reason, argv, cause_of(error))
            if document is not None and keep is not None:
                keep(document)
            if reason == "interrupted" and document is not None:
                return document
            raise
        if outcome.value is not None:
            value = outcome.value
            return make_document(
                request,
                value["head"],
                value["rows"],
                exit_reason=outcome.exit_reason,
                argv=argv,
                uses=value["uses"],
            )
        if outcome.exit_reason == "done":  # an external rank that is not the first
            return None
        return _from_journal(request, journal, outcome.exit_reason, argv, outcome.failure) or _nothing(
            request, nproc, outcome.exit_reason, argv, outcome.failure
        )


def _refuse_early(request: CommRequest, nproc: int, device: str, backend: str) -> None:
    """Refuse wrong requests before any rank exists; external ranks each give the same error.

    On ``auto`` devices the backend is not known yet, so only what no backend does is refused here.
    """
    size = ranks_of(nproc)
    if size < 1:
        raise ConfigError(f"--nproc is {size}; there must be at least 1 rank.")
    group_ranks(request, size)
    import torch  # noqa: PLC0415

    # Asking how many devices there are does not start CUDA in this process, which may fork ranks.
    cuda = device == "cuda" or (device == "auto" and torch.cuda.device_count() > 0)
    points = plan_points(request, size, backend if backend != "auto" else "nccl" if cuda else "gloo")
    if not cuda:
        refuse_too_large(points, int(os.environ.get("LOCAL_WORLD_SIZE", size)) if external_launcher() else size)


def _from_journal(
    request: CommRequest, journal: Path | None, exit_reason: str, argv: Sequence[str], failure: Failure | None
) -> dict[str, Any] | None:
    kept = read_kept(journal)
    if not kept:
        return None
    head, *rows = kept
    return make_document(request, head, rows, exit_reason=exit_reason, argv=argv, failure=failure)


def _nothing(
    request: CommRequest, nproc: int, exit_reason: str, argv: Sequence[str], failure: Failure | None
) -> dict[str, Any]:
    """The document of ranks that did not even meet."""
    head = {
        "world_size": nproc,
        "groups": nproc // group_ranks(request, nproc),
        "backend": None,
        "device": None,
        "environment": environment(),
    }
    return make_document(request, head, [], exit_reason=exit_reason, argv=argv, failure=failure)
