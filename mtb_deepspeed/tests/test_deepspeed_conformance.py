"""Strategy `deepspeed` under the conformance kit, each ZeRO stage."""

from __future__ import annotations

import pytest

from mtb_core.testing import Capabilities, StrategyConformance


@pytest.mark.slow
class TestStage2(StrategyConformance):
    strategy = "deepspeed"
    options = {"stage": "2"}
    capabilities = Capabilities(sync_modes=("every",), sharded=True)


@pytest.mark.slow
class TestStage0(StrategyConformance):
    strategy = "deepspeed"
    options = {"stage": "0"}
    capabilities = Capabilities(sync_modes=("last",))


@pytest.mark.slow
class TestStage1(StrategyConformance):
    strategy = "deepspeed"
    options = {"stage": "1"}
    capabilities = Capabilities(sync_modes=("last",), sharded=True)


@pytest.mark.slow
class TestStage3(StrategyConformance):
    strategy = "deepspeed"
    options = {"stage": "3", "param_persistence_threshold": "0"}
    capabilities = Capabilities(sync_modes=("every",), sharded=True)
