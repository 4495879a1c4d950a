"""The JSON document of ``mtb comm``; ``docs/communication.md`` describes every key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from mtb_core import ConfigError, Failure
from mtb_evidence import Timed, performance_fields, provenance

from .definitions import DEFINITION
from .fit import fit_rows
from .kept import first_line
from .points import CommRequest
from .shape import shape_fault

SCHEMA_VERSION = 1


def make_document(
    request: CommRequest,
    head: Mapping[str, Any],
    rows: Sequence[dict[str, Any]],
    *,
    exit_reason: str,
    argv: Sequence[str],
    failure: Failure | None = None,
    uses: Sequence[Any] = (),
) -> dict[str, Any]:
    """All that came out; `head` is what rank 0 found out about where it runs, `uses` what `gather_uses` gave."""
    done = exit_reason == "done"
    reasons = [] if done else [f"the run ended early: {exit_reason}"]
    wrong = sum(row["status"] == "failed" for row in rows)
    if wrong:
        reasons.append(f"{wrong} rows have wrong elements")
    if not request.check:
        reasons.append("results were not checked")
    performance = performance_fields(
        uses,
        # Of calls the spread is a figure of its own, not how sure the mean is: rows have percentiles.
        [Timed(row["iterations"]) for row in rows if row["status"] != "skipped"],
        device=head["device"],
        reasons=reasons,
        each="call",
        row="point",
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "communication",
        "exit_reason": exit_reason,
        "failure": None if failure is None else {"rank": failure.rank, "text": first_line(str(failure))},
        "world_size": head["world_size"],
        "groups": head["groups"],
        "backend": head["backend"],
        "device": head["device"],
        "definition": DEFINITION,
        "config": attrs.asdict(request),
        "results": list(rows),
        "fits": fit_rows(rows),
        "environment": head["environment"],
        "provenance": provenance(argv),
        "execution_complete": done,
        **performance,
    }


def read_document(path: str | Path) -> dict[str, Any]:
    """A communication document that was written before.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        document: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON: {error}. Give a file that `mtb comm --output` wrote."
        ) from error
    found = document.get("benchmark") if isinstance(document, dict) else type(document).__name__
    if found != "communication" or document.get("schema_version") != SCHEMA_VERSION:
        version = document.get("schema_version") if isinstance(document, dict) else None
        raise ConfigError(
            f"{path} holds {found!r} of schema {version!r}, but 'communication' of schema {SCHEMA_VERSION} is wanted. "
            "Give a file that `mtb comm --output` wrote."
        )
    fault = shape_fault(document)
    if fault is not None:
        raise ConfigError(
            f"{path} is no whole communication document: {fault}. Give a file as `mtb comm --output` wrote it."
        )
    return dict(document)
