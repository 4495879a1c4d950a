"""Launching the ranks, and the JSON document of what they found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from mtb_comm.kept import cause_of, first_line, kept_file, read_kept
from mtb_comm.points import ranks_of
from mtb_core import ConfigError, RanksOutcome, external_launcher, run_ranks
from mtb_evidence import Timed, environment, performance_fields, provenance

from .settings import RouteSettings


@attrs.frozen
class Launch:
    """Number, device, backend and start method of the ranks; see `mtb_core.run_ranks`."""

    nproc: int
    device: str
    backend: str
    start_method: str


def measure(
    points: tuple[RouteSettings, ...],
    launch: Launch,
    *,
    on_progress: Callable[[dict[str, Any]], None],
    debug: bool,
    keep: Callable[[Measured], object] | None = None,
) -> Measured:
    """Measure `points` on ranks that are launched here, or as one rank of torchrun's.

    Args:
        keep: is given what was finished before an error of external ranks goes on to their launcher; on the rank that
            has it, if any.

    Raises:
        ConfigError: nothing was started.
    """
    from .benchmark import Work, measure_points  # noqa: PLC0415  (imports torch; help must not)

    with kept_file() as kept:
        try:
            outcome = run_ranks(
                measure_points,
                Work(points, kept),
                nproc=launch.nproc,
                device=launch.device,
                backend=launch.backend,
                start_method=launch.start_method,
                on_progress=on_progress,
                debug=debug,
            )
        except ConfigError:
            raise
        except BaseException as error:
            # Only external ranks, and a lone one at a second Ctrl-C, get here: `run_ranks` passes their errors on.
            rows = read_kept(kept)
            if rows and keep is not None:
                interrupted = isinstance(error, KeyboardInterrupt)
                outcome = RanksOutcome("interrupted" if interrupted else "failed", failure=cause_of(error))
                keep(Measured({**rows[0], "rows": rows[1:]}, len(points), outcome))
            raise
        return Measured(outcome.value or _found(kept, launch), len(points), outcome)


def _found(kept: Path | None, launch: Launch) -> dict[str, Any]:
    """Rows of ranks that did not finish; if they never met, a head that says what was asked for."""
    nowhere = {"world_size": ranks_of(launch.nproc), "device": None, "backend": None}
    head, *rows = read_kept(kept) or [{**nowhere, "environment": environment()}]
    return {**head, "rows": rows}


@attrs.frozen
class Measured:
    """Result of the ranks, the number of points asked for, and the outcome."""

    found: dict[str, Any]
    points: int
    outcome: RanksOutcome

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of the finished points."""
        rows: list[dict[str, Any]] = self.found["rows"]
        return rows

    @property
    def exit_code(self) -> int:
        """Exit code of ``mtb``: 0; 1 if a check failed; 3, 4, 130 if ranks failed, stopped, were interrupted."""
        early = {"failed": 3, "stopped": 4, "interrupted": 130}.get(self.outcome.exit_reason)
        if early is not None and external_launcher() and self.outcome.exit_reason != "failed":
            return 0  # torchrun takes any other code for a failure
        return early or int(any(row["status"] == "failed" for row in self.rows))


def document(measured: Measured, *, sweep: bool) -> dict[str, Any]:
    """The JSON document: of `route` the row's keys beside the common ones, of `sweep` the rows as ``results``."""
    found, outcome, failure = measured.found, measured.outcome, measured.outcome.failure
    complete = len(measured.rows) == measured.points
    reasons = [] if complete else [f"the run ended early: {outcome.exit_reason}"]
    reasons += [
        f"the check failed: {', '.join(r['check']['failed'])}" for r in measured.rows if r["status"] == "failed"
    ]
    times = [(row["iters"], row["time_ms"]["iteration"]) for row in measured.rows]
    performance = performance_fields(
        found.get("uses", ()),
        [Timed(count, spread["p50"], spread["p95"]) for count, spread in times],
        device=found["device"],
        reasons=reasons,
        each="iteration",
        row="point",
    )
    common = {
        "schema_version": 1,
        "benchmark": "moe_routing",
        "exit_reason": outcome.exit_reason,
        "world_size": found["world_size"],
        "backend": found["backend"],
        "device": found["device"],
    }
    rows: dict[str, Any] = {"results": measured.rows} if sweep else measured.rows[0] if measured.rows else {}
    return {
        **common,
        **rows,
        "failure": None if failure is None else {"rank": failure.rank, "text": first_line(str(failure))},
        "execution_complete": complete,
        **performance,
        "environment": found["environment"],
        "provenance": provenance(sys.argv),
    }
