"""Strategy `deepspeed` under the conformance kit, each ZeRO stage."""

from __future__ import annotations

import pytest

from mtb_kit import ESSENTIAL, NUMBERS, Capabilities, StrategyConformance


class TestEssential(StrategyConformance):
    strategy = "deepspeed"
    options = {"stage": "2"}
    capabilities = Capabilities(world_sizes=(2,), sharded=True, exact=True, exact_resume=True, resharding=True)
    only = ESSENTIAL


@pytest.mark.slow
class TestStage2(StrategyConformance):
    strategy = "deepspeed"
    options = {"stage": "2"}
    capabilities = Capabilities(world_sizes=(1, 3), sharded=True)


@pytest.mark.slow
class TestStage3(StrategyConformance):
    strategy = "deepspeed"
    options = {"stage": "3", "param_persistence_threshold": "0"}
    capabilities = Capabilities(world_sizes=(3,), sharded=True)


@pytest.mark.slow
class TestStage1(StrategyConformance):
    strategy = "deepspeed"
    options = {"stage": "1"}
    capabilities = Capabilities(world_sizes=(2,), sharded=True)
    only = NUMBERS


@pytest.mark.slow
class TestStage0(StrategyConformance):
    strategy = "deepspeed"
    options = {"stage": "0"}
    capabilities = Capabilities(world_sizes=(2,))
    only = NUMBERS
