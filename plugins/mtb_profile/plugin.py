"""What this distribution provides: the command ``profile``. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import CommandInfo, hookimpl

PLUGIN_API = 2


@hookimpl
def mtb_commands() -> Sequence[CommandInfo]:
    """Command ``profile``."""
    return [
        CommandInfo(
            "profile", "Profile a training, or analyse PyTorch traces: what bounds it", "mtb_profile.command:profile"
        )
    ]
