"""Strategies `fsdp` and `fsdp1` under the conformance kit, in all options."""

from __future__ import annotations

import pytest

from mtb_core.testing import Capabilities, StrategyConformance

SHARDED = Capabilities(sharded=True)


class TestFSDP(StrategyConformance):
    """What only three ranks show (shards of unlike sizes) is among the fast tests of parity and of resuming."""

    strategy = "fsdp"
    capabilities = Capabilities(sharded=True, world_sizes=(1, 2))


@pytest.mark.slow
class TestThreeRanks(StrategyConformance):
    strategy = "fsdp"
    capabilities = Capabilities(sharded=True, world_sizes=(2, 3))


@pytest.mark.slow
class TestKeepGathered(StrategyConformance):
    strategy = "fsdp"
    options = {"reshard_after_forward": "false"}
    capabilities = SHARDED


@pytest.mark.slow
class TestReshardOverTwo(StrategyConformance):
    strategy = "fsdp"
    options = {"reshard_after_forward": "2"}
    capabilities = Capabilities(sharded=True, world_sizes=(4,))


@pytest.mark.slow
class TestRoot(StrategyConformance):
    strategy = "fsdp"
    options = {"wrap": "root"}
    capabilities = SHARDED


@pytest.mark.slow
class TestAutoSize(StrategyConformance):
    strategy = "fsdp"
    options = {"wrap": "auto-size", "wrap_size": "300"}
    capabilities = SHARDED


@pytest.mark.slow
class TestCopies(StrategyConformance):
    strategy = "fsdp"
    options = {"hsdp": "2"}
    capabilities = Capabilities(sharded=True, world_sizes=(4,))


@pytest.mark.slow
class TestOffload(StrategyConformance):
    strategy = "fsdp"
    options = {"cpu_offload": "true", "prefetch": "1"}
    capabilities = SHARDED


@pytest.mark.slow
class TestUnused(StrategyConformance):
    strategy = "fsdp"
    options = {"unused_parameters": "true"}
    capabilities = SHARDED


@pytest.mark.slow
class TestReduceInBf16(StrategyConformance):
    strategy = "fsdp"
    options = {"reduce_dtype": "bf16"}
    capabilities = Capabilities(exact=False, sharded=True)


@pytest.mark.slow
class TestLegacy(StrategyConformance):
    strategy = "fsdp1"
    capabilities = SHARDED


@pytest.mark.slow
class TestLegacyGradOp(StrategyConformance):
    strategy = "fsdp1"
    options = {"sharding": "grad-op"}
    capabilities = SHARDED


@pytest.mark.slow
class TestLegacyNone(StrategyConformance):
    strategy = "fsdp1"
    options = {"sharding": "none"}
