"""The conformance kit: whether a strategy plugin is right. See ``docs/conformance.md``.

`StrategyConformance` is the base class for a plugin's own tests, `Capabilities` what its author declares beside the
plan, `ESSENTIAL` and `NUMBERS` are selections of checks; the same checks run as ``mtb plugins check NAME``. Besides:
`recording`, `held`, `launches`, `live` and `examples`, for tests of strategies and sinks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtb_core import lazy_names

if TYPE_CHECKING:
    from .capabilities import Capabilities
    from .checking import ESSENTIAL, NUMBERS
    from .conformance import StrategyConformance

__all__ = ["ESSENTIAL", "NUMBERS", "Capabilities", "StrategyConformance"]

_LAZY = {
    "ESSENTIAL": ".checking",
    "NUMBERS": ".checking",
    "Capabilities": ".capabilities",
    "StrategyConformance": ".conformance",
}

__getattr__ = lazy_names(__name__, _LAZY)
