"""MiniTrainBench plugin: strategies `fsdp` and `fsdp1`, and FSDP2 over any mesh for the strategies of other plugins.

Importing it imports no torch; the names below do when they are first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtb_core import lazy_names

if TYPE_CHECKING:
    from mtb_fsdp.wrapping import ShardedModule, sharded_optimizer, wrap_fsdp

__all__ = ["ShardedModule", "sharded_optimizer", "wrap_fsdp"]

__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, ".wrapping"))
