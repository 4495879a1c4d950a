"""Strategy `pp` passes the conformance kit at each shape of (pipeline, data-parallel) ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from mtb_core.testing import Capabilities, StrategyConformance

pytestmark = pytest.mark.slow


class TestStages(StrategyConformance):
    """(pp, dp) = (2, 1)."""

    strategy = "pp"
    capabilities = Capabilities(world_sizes=(2,), custom_models=False)


class TestStagesTimesShards(StrategyConformance):
    """(pp, dp) = (2, 2), all forwards first, each stage sharded."""

    strategy = "pp"
    options: ClassVar[Mapping[str, Any]] = {"pp": "2", "schedule": "gpipe", "data_parallel": "fsdp"}
    capabilities = Capabilities(world_sizes=(4,), custom_models=False, sharded=True)
