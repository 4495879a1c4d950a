"""MiniTrainBench plugin: strategy `ddp`, and DistributedDataParallel over any ranks for the strategies of other plugins.

Importing it imports no torch; the names below do when they are first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtb_ddp.wrapping import ReplicatedModule, wrap_ddp

__all__ = ["ReplicatedModule", "wrap_ddp"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from mtb_ddp import wrapping  # noqa: PLC0415  (it imports torch)

        return getattr(wrapping, name)
    msg = f"module 'mtb_ddp' has no attribute {name!r}"
    raise AttributeError(msg)
