"""Entry point: the launcher `local`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import LauncherInfo, hookimpl

PLUGIN_API = 2


@hookimpl
def mtb_launchers() -> Sequence[LauncherInfo]:
    """`local`."""
    return [
        LauncherInfo(
            "local", "Processes of this machine; several nodes meet by --rdzv-endpoint", "mtb_launcher.elastic:launch"
        )
    ]
