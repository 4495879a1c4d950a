"""Strategy `cp` passes the conformance kit at each shape of (context-parallel, data-parallel) ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from mtb_kit import ESSENTIAL, NUMBERS, Capabilities, StrategyConformance

#: Four equal parts, which 6 positions have not.
LENGTH: Mapping[str, Any] = {"seq_length": 8}


class TestEssential(StrategyConformance):
    """(cp, dp) = (2, 1)."""

    strategy = "cp"
    capabilities = Capabilities(world_sizes=(2,), exact=True, exact_resume=True, resharding=True)
    settings: ClassVar[Mapping[str, Any]] = LENGTH
    only = ESSENTIAL


@pytest.mark.slow
class TestGathered(StrategyConformance):
    """(cp, dp) = (2, 1)."""

    strategy = "cp"
    capabilities = Capabilities(world_sizes=(2,))
    settings: ClassVar[Mapping[str, Any]] = LENGTH


@pytest.mark.slow
class TestRing(StrategyConformance):
    """(cp, dp) = (2, 2), sharded over all ranks, keys and values in a ring, contiguous positions."""

    strategy = "cp"
    options: ClassVar[Mapping[str, Any]] = {
        "cp": "2",
        "attention": "ring",
        "balance": "contiguous",
        "data_parallel": "fsdp",
    }
    capabilities = Capabilities(world_sizes=(4,), sharded=True)
    only = NUMBERS
