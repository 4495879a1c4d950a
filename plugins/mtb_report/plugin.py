"""What this distribution provides: the commands about results. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import CommandInfo, hookimpl

PLUGIN_API = 2


@hookimpl
def mtb_commands() -> Sequence[CommandInfo]:
    """Commands ``compare``, ``sweep``, ``report``, ``explain`` and ``evidence``."""
    return [
        CommandInfo(
            "compare",
            "Tell whether one of two runs is faster, and how sure that is",
            "mtb_report.compare.command:compare",
        ),
        CommandInfo("sweep", "Run a matrix of trainings from a TOML file", "mtb_report.sweep.command:sweep"),
        CommandInfo(
            "report", "Make a report of results: Markdown, HTML or terminal", "mtb_report.report.command:report"
        ),
        CommandInfo("explain", "Say in prose what a result's numbers mean", "mtb_report.report.command:explain"),
        CommandInfo(
            "evidence",
            "List results with digests, and look for what must not be there",
            "mtb_report.evidence.command:evidence",
        ),
    ]
