"""Strategy `ddp` under the conformance kit."""

from __future__ import annotations

import pytest

from mtb_core.testing import Capabilities, StrategyConformance


class TestDDP(StrategyConformance):
    strategy = "ddp"
    capabilities = Capabilities(world_sizes=(1, 2))


@pytest.mark.slow
class TestThreeRanks(StrategyConformance):
    strategy = "ddp"
    capabilities = Capabilities(world_sizes=(2, 3))


@pytest.mark.slow
class TestZero1(StrategyConformance):
    strategy = "ddp"
    options = {"zero1": "true"}


@pytest.mark.slow
class TestFindUnused(StrategyConformance):
    strategy = "ddp"
    options = {"find_unused_parameters": "true"}


@pytest.mark.slow
class TestStaticGraph(StrategyConformance):
    strategy = "ddp"
    options = {"static_graph": "true"}
    capabilities = Capabilities(sync_modes=("every",))


@pytest.mark.slow
class TestCompressed(StrategyConformance):
    strategy = "ddp"
    options = {"comm_hook": "bf16"}
    capabilities = Capabilities(exact=False, sync_modes=("last",))
