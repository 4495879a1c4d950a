"""The certificate of a strategy: a document for programs, and a page for people."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import attrs

from mtb_core import ConfigError
from mtb_evidence import environment, provenance

from .checking import Outcome, all_checks, cases, digest, likely_cause
from .lab import Lab

SCHEMA_VERSION = 1
#: Numbers of ranks at which a strategy for several has a plan at one of them at least.
_SEVERAL = (2, 3, 4)


@attrs.frozen
class Certificate:
    """Outcomes of all that was run, in order.

    Attributes:
        complete: every check of the kit was run at every number of ranks, and one of these is above 1 if the strategy
            trains on several.
        conformant: complete, and nothing failed.
    """

    lab: Lab
    outcomes: Sequence[Outcome]

    def count(self, status: str) -> int:
        """Number of outcomes with that status."""
        return sum(o.status == status for o in self.outcomes)

    @property
    def complete(self) -> bool:
        """See the class."""
        return self._whole and self._on_several

    @property
    def _whole(self) -> bool:
        return {o.case.name for o in self.outcomes} == {c.name for c in cases(self.lab.world_sizes)}

    @property
    def _on_several(self) -> bool:
        """True if ranks had to agree on something, or the strategy is for one process alone."""
        if max(self.lab.world_sizes) > 1:
            return True
        for ranks in _SEVERAL:
            with contextlib.suppress(ConfigError):
                self.lab.plan(ranks)
                return False
        return True

    @property
    def conformant(self) -> bool:
        """See the class."""
        return self.complete and not self.count("failed")

    def as_json(self) -> dict[str, Any]:
        """The document; its keys are in ``docs/reference/json.md``."""
        cause = likely_cause(self.outcomes)
        provider = self.lab.registry.provider("strategies", self.lab.info.name)
        return {
            "schema_version": SCHEMA_VERSION,
            "benchmark": "conformance",
            "strategy": self.lab.info.name,
            "strategy_options": dict(self.lab.options),
            "distribution": None if provider is None else provider.distribution,
            "version": None if provider is None else provider.version,
            "world_sizes": list(self.lab.world_sizes),
            "promises": {str(ranks): self.lab.promised(ranks) for ranks in self.lab.world_sizes},
            "kit_digest": digest(),
            "versions": {
                "python": platform.python_version(),
                "torch": metadata.version("torch"),
                "mtb-core": metadata.version("mtb-core"),
            },
            "checks": [_row(outcome) for outcome in self.outcomes],
            "passed": self.count("passed"),
            "failed": self.count("failed"),
            "skipped": self.count("skipped"),
            "likely_cause": None if cause is None else cause.case.name,
            "complete": self.complete,
            "conformant": self.conformant,
            "environment": environment(),
            "provenance": provenance(sys.argv),
        }

    def text(self) -> str:
        """The certificate as plain text."""
        document = self.as_json()
        options = " ".join(f"{k}={v}" for k, v in self.lab.options.items())
        who = f"{document['distribution']} {document['version']}" if document["distribution"] else "not installed"
        versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
        lines = [
            f"Conformance of strategy '{self.lab.info.name}'{' with ' + options if options else ''} ({who})",
            f"  ranks     {', '.join(map(str, self.lab.world_sizes))}, gloo, on this machine",
            f"  versions  {versions}",
            f"  kit       {len(all_checks())} checks, digest {document['kit_digest'][:16]}",
            f"  passed    {document['passed']}",
            f"  failed    {document['failed']}",
            f"  skipped   {document['skipped']}",
            *(f"            {name}: {reason}" for name, reason in self._skipped()),
            *(f"  figure    {name}: {text}" for name, text in self._figures()),
        ]
        return "\n".join([*lines, f"  verdict   {self._verdict()}", *self._cause()])

    def _verdict(self) -> str:
        skipped, all_of_them = self.count("skipped"), len(self.outcomes)
        why = "a selection of the checks was run; a certificate needs them all"
        if self._whole and not self._on_several:
            why = "it ran on one rank alone; a certificate needs 2 or more, so leave --nproc out"
        note = "" if self.complete else f" ({why})"
        if self.count("failed"):
            return f"NOT CONFORMANT{note}"
        if not self.complete:
            return f"INCOMPLETE{note}"
        if skipped:
            return f"CONFORMANT AS DECLARED ({skipped} of {all_of_them} checks were not run; the reasons are above)"
        return "CONFORMANT"

    def _cause(self) -> list[str]:
        cause = likely_cause(self.outcomes)
        if cause is None or self.count("failed") == 1:
            return []
        return [f"  begin at  {cause.case.name}; the other failures may follow from it: {cause.mistake}"]

    def _skipped(self) -> list[tuple[str, str]]:
        found: dict[tuple[str, str], list[str]] = {}
        for o in self.outcomes:
            if o.status == "skipped":
                found.setdefault((o.case.check.name, o.reason), []).append(str(o.case.ranks))
        return [(f"{name} @{','.join(ranks)}", reason) for (name, reason), ranks in found.items()]

    def _figures(self) -> list[tuple[str, str]]:
        return [
            (o.case.name, ", ".join(f"{key} {_short(value)}" for key, value in o.figures.items()))
            for o in self.outcomes
            if o.figures
        ]


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _row(outcome: Outcome) -> dict[str, Any]:
    check = outcome.case.check
    row: dict[str, Any] = {
        "name": check.name,
        "ranks": outcome.case.ranks,
        "status": outcome.status,
        "title": check.title,
        "reason": outcome.reason or None,
        "expected": outcome.expected or None,
        "seen": outcome.seen or None,
        "mistake": outcome.mistake if outcome.status == "failed" else None,
        "page": check.page,
        "figures": dict(outcome.figures),
        "seconds": round(outcome.seconds, 3),
    }
    return row
