"""Strategy `ep` passes the conformance kit at each shape of (data-parallel, expert-parallel) ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from mtb_core.testing import Capabilities, StrategyConformance

pytestmark = pytest.mark.slow

MODEL: Mapping[str, Any] = {"model": "moe", "model_opt": {"experts": 6, "d_ff": 32, "aux_loss": 0.1, "z_loss": 0.01}}


class TestSharedExperts(StrategyConformance):
    """(dp, ep) = (1, 2) and (1, 3)."""

    strategy = "ep"
    capabilities = Capabilities(world_sizes=(2, 3), custom_models=False, sharded=True)
    settings: ClassVar[Mapping[str, Any]] = MODEL


class TestReplicatedExperts(StrategyConformance):
    """(dp, ep) = (1, 1) and (2, 1)."""

    strategy = "ep"
    options: ClassVar[Mapping[str, Any]] = {"ep": "1"}
    capabilities = Capabilities(world_sizes=(1, 2), custom_models=False)
    settings: ClassVar[Mapping[str, Any]] = MODEL


class TestSharedBoth(StrategyConformance):
    """(dp, ep) = (2, 2), with a capacity."""

    strategy = "ep"
    options: ClassVar[Mapping[str, Any]] = {"ep": "2"}
    capabilities = Capabilities(world_sizes=(4,), custom_models=False, sharded=True)
    settings: ClassVar[Mapping[str, Any]] = {**MODEL, "model_opt": {**MODEL["model_opt"], "capacity_factor": 1.0}}
