"""What this distribution provides. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import StrategyInfo, hookimpl

PLUGIN_API = 1


@hookimpl
def mtb_strategies() -> Sequence[StrategyInfo]:
    """Nothing yet."""
    return []
