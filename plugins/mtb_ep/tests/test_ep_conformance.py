"""Strategy `ep` passes the conformance kit at each shape of (data-parallel, expert-parallel) ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from mtb_kit import ESSENTIAL, NUMBERS, Capabilities, StrategyConformance

MODEL: Mapping[str, Any] = {"model": "moe", "model_opt": {"experts": 6, "d_ff": 32, "aux_loss": 0.1, "z_loss": 0.01}}


class TestEssential(StrategyConformance):
    """(dp, ep) = (1, 2)."""

    strategy = "ep"
    capabilities = Capabilities(world_sizes=(2,), sharded=True, exact=True, exact_resume=True, resharding=True)
    settings: ClassVar[Mapping[str, Any]] = MODEL
    only = ESSENTIAL


@pytest.mark.slow
class TestSharedExperts(StrategyConformance):
    """(dp, ep) = (1, 2) and (1, 3)."""

    strategy = "ep"
    capabilities = Capabilities(world_sizes=(3,), sharded=True)
    settings: ClassVar[Mapping[str, Any]] = MODEL


@pytest.mark.slow
class TestReplicatedExperts(StrategyConformance):
    """(dp, ep) = (2, 1)."""

    strategy = "ep"
    options: ClassVar[Mapping[str, Any]] = {"ep": "1"}
    capabilities = Capabilities(world_sizes=(2,))
    settings: ClassVar[Mapping[str, Any]] = MODEL
    only = NUMBERS


@pytest.mark.slow
class TestSharedBoth(StrategyConformance):
    """(dp, ep) = (2, 2), with a capacity."""

    strategy = "ep"
    options: ClassVar[Mapping[str, Any]] = {"ep": "2"}
    capabilities = Capabilities(world_sizes=(4,), sharded=True)
    settings: ClassVar[Mapping[str, Any]] = {**MODEL, "model_opt": {**MODEL["model_opt"], "capacity_factor": 1.0}}
    only = NUMBERS
