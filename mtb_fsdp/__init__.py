"""MiniTrainBench plugin: strategies `fsdp` and `fsdp1`, and FSDP2 over any mesh for the strategies of other plugins.

Importing it imports no torch; the names below do when they are first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtb_fsdp.wrapping import ShardedModule, sharded_optimizer, wrap_fsdp

__all__ = ["ShardedModule", "sharded_optimizer", "wrap_fsdp"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from mtb_fsdp import wrapping  # noqa: PLC0415  (it imports torch)

        return getattr(wrapping, name)
    msg = f"module 'mtb_fsdp' has no attribute {name!r}"
    raise AttributeError(msg)
