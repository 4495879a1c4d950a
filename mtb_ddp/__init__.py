"""MiniTrainBench plugin: strategy `ddp`, and DistributedDataParallel over any ranks for the strategies of other plugins.

Importing it imports no torch; the names below do when they are first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtb_core import lazy_names

if TYPE_CHECKING:
    from mtb_ddp.wrapping import ReplicatedModule, wrap_ddp

__all__ = ["ReplicatedModule", "wrap_ddp"]

__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, ".wrapping"))
