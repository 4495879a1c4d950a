"""Strategy `pp` passes the conformance kit at each shape of (pipeline-parallel, data-parallel) ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from mtb_kit import ESSENTIAL, NUMBERS, Capabilities, StrategyConformance


class TestEssential(StrategyConformance):
    """(pp, dp) = (2, 1)."""

    strategy = "pp"
    capabilities = Capabilities(world_sizes=(2,), exact=True, exact_resume=True, resharding=True)
    only = ESSENTIAL


@pytest.mark.slow
class TestStages(StrategyConformance):
    """(pp, dp) = (1, 1), (2, 1) and (3, 1)."""

    strategy = "pp"
    capabilities = Capabilities(world_sizes=(1, 3))
    settings: ClassVar[Mapping[str, Any]] = {"n_layers": 3}


@pytest.mark.slow
class TestInterleaved(StrategyConformance):
    """(pp, dp) = (2, 1), two stages on each rank."""

    strategy = "pp"
    options: ClassVar[Mapping[str, Any]] = {"schedule": "interleaved"}
    capabilities = Capabilities(world_sizes=(2,))
    settings: ClassVar[Mapping[str, Any]] = {"n_layers": 4}
    only = NUMBERS


@pytest.mark.slow
class TestBoth(StrategyConformance):
    """(pp, dp) = (2, 2), each stage in shards over its data-parallel ranks, all forwards first."""

    strategy = "pp"
    options: ClassVar[Mapping[str, Any]] = {"pp": "2", "data_parallel": "fsdp", "schedule": "gpipe"}
    capabilities = Capabilities(world_sizes=(4,), sharded=True)
    only = NUMBERS
