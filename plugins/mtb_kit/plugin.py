"""Entry point: ``mtb plugins check``. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import CommandInfo, hookimpl

PLUGIN_API = 2


@hookimpl
def mtb_commands() -> Sequence[CommandInfo]:
    """``plugins check``."""
    return [CommandInfo("plugins check", "Check a strategy: the conformance kit.", "mtb_kit.command:check")]
