"""Strategies `fsdp` and `fsdp1` under the conformance kit, in all options."""

from __future__ import annotations

import pytest

from mtb_kit import ESSENTIAL, NUMBERS, Capabilities, StrategyConformance

#: On two ranks; what only three show (shards of unlike sizes) the complete class below sees.
ON_TWO = Capabilities(world_sizes=(2,), sharded=True)
ON_FOUR = Capabilities(world_sizes=(4,), sharded=True)


class TestEssential(StrategyConformance):
    strategy = "fsdp"
    capabilities = Capabilities(world_sizes=(2,), sharded=True, exact=True, exact_resume=True, resharding=True)
    only = ESSENTIAL


@pytest.mark.slow
class TestFSDP(StrategyConformance):
    strategy = "fsdp"
    capabilities = Capabilities(world_sizes=(1, 3), sharded=True)


@pytest.mark.slow
class TestKeepGathered(StrategyConformance):
    strategy = "fsdp"
    options = {"reshard_after_forward": "false"}
    capabilities = ON_TWO
    only = ESSENTIAL


@pytest.mark.slow
class TestReshardOverTwo(StrategyConformance):
    strategy = "fsdp"
    options = {"reshard_after_forward": "2"}
    capabilities = ON_FOUR
    only = ESSENTIAL


@pytest.mark.slow
class TestRoot(StrategyConformance):
    strategy = "fsdp"
    options = {"wrap": "root"}
    capabilities = ON_TWO
    only = NUMBERS


@pytest.mark.slow
class TestAutoSize(StrategyConformance):
    strategy = "fsdp"
    options = {"wrap": "auto-size", "wrap_size": "300"}
    capabilities = ON_TWO
    only = ESSENTIAL


@pytest.mark.slow
class TestCopies(StrategyConformance):
    strategy = "fsdp"
    options = {"hsdp": "2"}
    capabilities = ON_FOUR
    only = ESSENTIAL


@pytest.mark.slow
class TestOffload(StrategyConformance):
    strategy = "fsdp"
    options = {"cpu_offload": "true", "prefetch": "1"}
    capabilities = ON_TWO
    only = NUMBERS


@pytest.mark.slow
class TestUnused(StrategyConformance):
    strategy = "fsdp"
    options = {"unused_parameters": "true"}
    capabilities = Capabilities(world_sizes=(3,), sharded=True)
    only = NUMBERS


@pytest.mark.slow
class TestReduceInBf16(StrategyConformance):
    strategy = "fsdp"
    options = {"reduce_dtype": "bf16"}
    capabilities = ON_TWO
    only = ESSENTIAL


@pytest.mark.slow
class TestLegacy(StrategyConformance):
    strategy = "fsdp1"
    capabilities = ON_TWO


@pytest.mark.slow
class TestLegacyGradOp(StrategyConformance):
    strategy = "fsdp1"
    options = {"sharding": "grad-op"}
    capabilities = Capabilities(world_sizes=(3,), sharded=True)
    only = NUMBERS


@pytest.mark.slow
class TestLegacyNone(StrategyConformance):
    strategy = "fsdp1"
    options = {"sharding": "none"}
    capabilities = Capabilities(world_sizes=(2,))
    only = ESSENTIAL
