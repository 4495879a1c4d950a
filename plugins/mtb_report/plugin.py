"""What this distribution provides. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import CommandInfo, hookimpl

PLUGIN_API = 1


@hookimpl
def mtb_commands() -> Sequence[CommandInfo]:
    """Nothing yet."""
    return []
