"""The evidence of a training, as core asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtb_core import Evidence, RankContext

from .audit import ADDRESS, HOME_FOLDER, HOST, audit_folder
from .origin import environment, provenance
from .validity import Sample, Timed, formal_obstacles, gather_uses, performance_fields

#: What ranks print is the user's own, and so are traces.
_NOT_SEARCHED = ("logs", "trace", "hang")
#: A path or endpoint in ``config.toml`` may have them; it is needed to run it again.
_NEEDED_IN_CONFIG = (HOME_FOLDER, HOST, ADDRESS)


class RunEvidence(Evidence):
    """Samples the machine when it is made and when the last trial ends; the rest follows from these two samples."""

    def __init__(self) -> None:
        self._start = Sample.take()

    def obstacles(self, argv: Sequence[str]) -> Sequence[str]:
        """A tree that is changed or not known, an image of another revision, a busy machine."""
        return formal_obstacles(provenance(argv))

    def origin(self, argv: Sequence[str], device: str = "cpu") -> Mapping[str, Any]:
        """Machine and software of this process; revision, image and command."""
        return {"environment": environment(device), "provenance": provenance(argv)}

    def performance(
        self, ctx: RankContext, rows: Sequence[Mapping[str, Any]], reasons: Sequence[str]
    ) -> Mapping[str, Any]:
        """Valid where nothing disturbed the ranks, and steps were enough and steady."""
        return performance_fields(
            gather_uses(ctx, self._start),
            [Timed(row["steps"], row["step_time_p50_ms"], row["step_time_p95_ms"]) for row in rows],
            device=ctx.device.partition(":")[0],
            reasons=reasons,
        )

    def audit(self, folder: Path) -> Sequence[str]:
        """Each file that tells who ran it or where, but not what another machine needs to run it again."""
        found = audit_folder(folder, skip=_NOT_SEARCHED)
        found["config.toml"] = [kind for kind in found.get("config.toml", ()) if kind not in _NEEDED_IN_CONFIG]
        return [f"{file} tells who ran it or where ({', '.join(kinds)})" for file, kinds in found.items() if kinds]
