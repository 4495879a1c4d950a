"""Input and output of a launcher, and `start_ranks`, through which every run starts its ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

from mtb_core.api.descriptions import LauncherInfo, load_reference
from mtb_core.api.errors import MtbError, RunFailed
from mtb_core.ranks.failures import Failure, failure_of
from mtb_core.ranks.worker import Worker

from .worker import alone, attach, external_launcher

ExitReason = Literal["done", "stopped", "interrupted", "failed"]


@attrs.frozen(kw_only=True)
class LaunchSpec:
    """Ranks to start.

    Attributes:
        entry: ``entry(payload, worker)``, a module-level function; what it returns must be picklable.
        payload: picklable, the same for all ranks.
        nproc: ranks on this node.
        min_nodes: the fewest nodes to start with.
        max_nodes: the most nodes.
        rdzv_endpoint: ``HOST:PORT`` where nodes meet; needed for more than one.
        max_restarts: how often all ranks are started again after a failure.
        start_method: ``"fork"``, ``"spawn"``, or ``"auto"``: fork where that is safe.
        log_dir: made if missing; rank N writes to ``rank_0000N.log`` there.
        on_line: ``on_line(rank, line)`` for each whole line that a rank of this node writes.
        on_progress: ``on_progress(fields)`` for each mapping that a rank hands to ``worker.progress``.
        on_restart: ``on_restart(failure, restarts)`` before ranks are started again.
        on_warning: ``on_warning(text)`` where ranks that were asked to stop do not.
        debug: let torch's own messages about launching through.
    """

    entry: Callable[[Any, Worker], Any]
    payload: Any = None
    nproc: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    rdzv_endpoint: str | None = None
    max_restarts: int = 0
    start_method: str = "auto"
    log_dir: Path
    on_line: Callable[[int, str], None] | None = None
    on_progress: Callable[[dict[str, Any]], None] | None = None
    on_restart: Callable[[Failure, int], None] | None = None
    on_warning: Callable[[str], None] | None = None
    debug: bool = False


@attrs.frozen
class LaunchOutcome:
    """Outcome of a launch.

    Attributes:
        exit_reason: ``"done"``; ``"stopped"`` by SIGTERM or SIGUSR1 and ``"interrupted"`` by Ctrl-C, where every
            rank left by itself or a second Ctrl-C ended them; ``"failed"``.
        values: what the entry returned, by global rank, of this node's ranks that returned; ``"done"``: all of them.
        failure: the first cause, where it failed; then it must be there.
        restarts: how often ranks were started again after a failure.
        signal: name of the first stop signal that this process itself got meanwhile; one that only a rank got does
            not show here.
    """

    exit_reason: ExitReason
    values: dict[int, Any]
    failure: Failure | None = None
    restarts: int = 0
    signal: str | None = None


def rank_log(folder: Path, rank: int) -> Path:
    """The file for a rank's output."""
    return folder / f"rank_{rank:05d}.log"


def start_ranks(spec: LaunchSpec, launcher: LauncherInfo | None) -> LaunchOutcome:
    """Run the entry on all ranks and wait for their end.

    Args:
        launcher: starts them. None: this process is a rank, of torchrun or Slurm, or the only one. A failure of such a
            rank is raised if `debug` is set or its launcher waits for it, and else is in the outcome and in the log.

    Raises:
        ConfigError: nothing was started.
        RunFailed: nodes could not meet; the launcher itself failed, or did not answer as `LaunchOutcome` says.
    """
    if launcher is not None:
        return _started(spec, launcher)
    external = external_launcher() is not None
    with attach() if external else alone() as worker:
        try:
            rank = worker if spec.on_progress is None else attrs.evolve(worker, progress=spec.on_progress)
            value = spec.entry(spec.payload, rank)
        except (Exception, SystemExit) as error:
            if external or spec.debug:
                raise
            failure = failure_of(error, worker.rank)
            with suppress(OSError):  # a full disk, which may be the cause itself, must not hide it
                spec.log_dir.mkdir(parents=True, exist_ok=True)
                rank_log(spec.log_dir, worker.rank).write_bytes(failure.traceback.encode("utf-8", "backslashreplace"))
            return LaunchOutcome("failed", {}, failure)
        stopped = worker.stop.requested
    reason: ExitReason = "done" if stopped is None else "interrupted" if stopped == "SIGINT" else "stopped"
    return LaunchOutcome(reason, {worker.rank: value}, None, worker.restarts, stopped)


def _started(spec: LaunchSpec, launcher: LauncherInfo) -> LaunchOutcome:
    try:
        start: Callable[[LaunchSpec], LaunchOutcome] = load_reference(launcher.impl)
        outcome = start(spec)
    except MtbError:
        raise
    except (Exception, SystemExit) as error:
        text = f"The launcher '{launcher.name}' ({launcher.impl}) failed: {type(error).__name__}: {error}."
        raise RunFailed(text) from error
    if wrong := _wrong(outcome, spec):
        raise RunFailed(f"The launcher '{launcher.name}' is wrong, and nothing is known of the run: {wrong}.")
    return outcome


def _wrong(outcome: Any, spec: LaunchSpec) -> str:
    """Error text if a launcher's answer is not as `LaunchOutcome` says; else empty."""
    if not isinstance(outcome, LaunchOutcome):
        return f"it returned {outcome!r}, not a LaunchOutcome"
    if outcome.exit_reason not in get_args(ExitReason):
        return f"its exit reason is {outcome.exit_reason!r}; valid: {', '.join(get_args(ExitReason))}"
    if outcome.exit_reason == "failed" and outcome.failure is None:
        return "it says 'failed' without a Failure"
    if outcome.exit_reason == "done":
        ranks = set(outcome.values)
        expected = set(range(spec.nproc)) if spec.max_nodes == 1 else ranks
        if (
            ranks != expected
            or len(ranks) != spec.nproc
            or any(isinstance(v, Failure) for v in outcome.values.values())
        ):
            return f"it says 'done', but has no value of each of the {spec.nproc} ranks of this node (of {sorted(ranks, key=str)})"
    return ""
