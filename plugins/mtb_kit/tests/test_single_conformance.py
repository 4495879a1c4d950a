"""Strategy `single` under the conformance kit."""

from __future__ import annotations

from mtb_kit import Capabilities, StrategyConformance


class TestSingle(StrategyConformance):
    strategy = "single"
    capabilities = Capabilities(world_sizes=(1,))
