"""Entry point: checkpoint formats of torch; see `mtb_core.hookimpl`. They are imported when used."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import FormatInfo, hookimpl

PLUGIN_API = 2


@hookimpl
def mtb_checkpoint_formats() -> Sequence[FormatInfo]:
    """`dcp`."""
    text = "Files that torch.distributed.checkpoint reads; all checkpoints of formats 1 to 3."
    return [FormatInfo("dcp", text, "mtb_dcp.storage:DcpStorage")]
