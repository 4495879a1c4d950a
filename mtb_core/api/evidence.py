"""Evidence for the figures of a run: a plugin provides it, and core gets by without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .values import RankContext

_UNKNOWN = (
    "nothing is known of the machine and the code, since no plugin has recorded them; install mtb-evidence, or do not "
    "switch it off"
)


class Evidence:
    """Vouch for a run: where and from what code its figures come, and whether they hold. Base class for plugins.

    Core makes one object, without arguments, in the process that starts a run, and one on each rank before its first
    trial. An object lives until the run ends there. An exception of a method ends the run.

    This class itself is what core uses where no plugin is there: it knows nothing, and the results say so.
    """

    def obstacles(self, argv: Sequence[str]) -> Sequence[str]:  # noqa: ARG002
        """Reasons why the result of a run that begins now could not be published; each refuses ``--formal``.

        Called for ``--formal`` by the process that starts the run, before anything is started or written. `argv` is
        the command.
        """
        return [_UNKNOWN]

    def origin(self, argv: Sequence[str], device: str = "cpu") -> Mapping[str, Any]:  # noqa: ARG002
        """Keys of `Result` that say where and from what code it comes: ``environment`` and ``provenance``.

        Called once for each result, also for one of a run that failed. `device` is "cpu" or "cuda:N".
        """
        return {"publishable": False, "unpublishable_reasons": [_UNKNOWN]}

    def performance(
        self,
        ctx: RankContext,  # noqa: ARG002
        rows: Sequence[Mapping[str, Any]],  # noqa: ARG002
        reasons: Sequence[str],
    ) -> Mapping[str, Any]:
        """Keys of `Result` that say whether its times may be compared with other runs.

        Called on all ranks after the last trial; collectives are allowed. These are ``conditions``,
        ``performance_valid`` and ``performance_invalid_reasons``. `rows` are the result's ``repeats``, `reasons` what
        core knows against its times.
        """
        return {"performance_valid": False, "performance_invalid_reasons": [*reasons, _UNKNOWN]}

    def audit(self, folder: Path) -> Sequence[str]:  # noqa: ARG002
        """Find what the records of the ended run in `folder` tell that must not be handed on, in words, file by file.

        Called by the process that started the run, and of external ranks by rank 0. Each text makes the result not
        publishable.
        """
        return ()
