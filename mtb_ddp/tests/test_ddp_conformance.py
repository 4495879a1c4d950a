"""Strategy `ddp` under the conformance kit, in all options."""

from __future__ import annotations

import pytest

from mtb_kit import NUMBERS, Capabilities, StrategyConformance


class TestDDP(StrategyConformance):
    """All checks, so that the fast tests run each of them at least once."""

    strategy = "ddp"
    capabilities = Capabilities(world_sizes=(2,), exact=True, exact_resume=True, resharding=True)


@pytest.mark.slow
class TestOtherRanks(StrategyConformance):
    strategy = "ddp"
    capabilities = Capabilities(world_sizes=(1, 3))


@pytest.mark.slow
class TestZero1(StrategyConformance):
    strategy = "ddp"
    options = {"zero1": "true"}
    capabilities = Capabilities(world_sizes=(3,))
    only = NUMBERS


@pytest.mark.slow
class TestFindUnused(StrategyConformance):
    strategy = "ddp"
    options = {"find_unused_parameters": "true"}
    capabilities = Capabilities(world_sizes=(2,))
    only = NUMBERS


@pytest.mark.slow
class TestStaticGraph(StrategyConformance):
    strategy = "ddp"
    options = {"static_graph": "true"}
    capabilities = Capabilities(world_sizes=(2,))
    only = NUMBERS


@pytest.mark.slow
class TestCompressed(StrategyConformance):
    strategy = "ddp"
    options = {"comm_hook": "bf16"}
    capabilities = Capabilities(world_sizes=(2,))
    only = NUMBERS
