"""What a run's own result tells of the conditions under which its traces were made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

#: Why a profiled run's times are no measurement.
NOT_VALID = "profiled: torch.profiler slows every operator, so the times are not those of a training"


@attrs.frozen
class Setting:
    """What traces do not tell; by default nothing is known.

    Attributes:
        one_machine: whether all ranks were on one machine; None: not known.
        disturbances: why the run's times are uncertain, beside its being profiled: other processes, load, jitter.
    """

    one_machine: bool | None = None
    disturbances: tuple[str, ...] = ()


def setting_of(result: Mapping[str, Any]) -> Setting:
    """As a run's ``result.json`` tells it; empty where there is none."""
    config, reasons = result.get("config"), result.get("performance_invalid_reasons")
    one = None
    if isinstance(config, Mapping) and str(config.get("nnodes")) == "1":
        one = True if config.get("nproc") == result.get("world_size") else None  # under torchrun nproc is not set
    told = reasons if isinstance(reasons, list | tuple) else ()
    return Setting(one, tuple(str(reason) for reason in told if reason != NOT_VALID))
