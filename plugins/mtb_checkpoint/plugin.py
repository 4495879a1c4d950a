"""Entry point: command ``checkpoint``. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import CommandInfo, hookimpl

PLUGIN_API = 2


@hookimpl
def mtb_commands() -> Sequence[CommandInfo]:
    """`checkpoint`."""
    return [
        CommandInfo("checkpoint", "List, show, verify, prune, export.", "mtb_checkpoint.command:checkpoint", "Training")
    ]
