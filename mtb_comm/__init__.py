"""MiniTrainBench plugin: commands `comm` and `moe`, and expert exchange for the strategies of other plugins.

Importing it imports no torch; the names below do when they are first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtb_core import lazy_names

if TYPE_CHECKING:
    from mtb_comm.moe.admission import positions
    from mtb_comm.moe.exchange import Exchange
    from mtb_comm.moe.gating import slot_weights
    from mtb_comm.moe.passage import Splits, through_experts
    from mtb_comm.moe.placement import capacity_per_expert

_LAZY = {
    "Exchange": ".moe.exchange",
    "Splits": ".moe.passage",
    "capacity_per_expert": ".moe.placement",
    "positions": ".moe.admission",
    "slot_weights": ".moe.gating",
    "through_experts": ".moe.passage",
}

__all__ = ["Exchange", "Splits", "capacity_per_expert", "positions", "slot_weights", "through_experts"]

__getattr__ = lazy_names(__name__, _LAZY)
