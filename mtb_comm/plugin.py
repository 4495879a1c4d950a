"""Entry point: commands ``comm`` and ``moe``. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import CommandInfo, hookimpl

PLUGIN_API = 2


@hookimpl
def mtb_commands() -> Sequence[CommandInfo]:
    """Commands ``comm`` and ``moe``."""
    return [
        CommandInfo(
            "comm", "Measure collectives: latency, algbw and busbw as nccl-tests defines them", "mtb_comm.command:comm"
        ),
        CommandInfo(
            "moe", "Measure MoE routing: all-to-all with the traffic that routers make", "mtb_comm.moe.command:moe"
        ),
    ]
