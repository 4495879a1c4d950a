"""Entry point: ``mtb data``. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import CommandInfo, hookimpl

PLUGIN_API = 2


@hookimpl
def mtb_commands() -> Sequence[CommandInfo]:
    """``data``."""
    return [CommandInfo("data", "Prepare and show token files.", "mtb_data.command:data", "Training")]
