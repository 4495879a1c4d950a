"""ZeRO stage 1 through torch's ZeroRedundancyOptimizer: optimizer state is split over ranks, parameter by parameter."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer  # type: ignore[attr-defined]

from mtb_core import Job, Prepared, State, module_state


def make_zero1(job: Job, module: nn.Module) -> torch.optim.Optimizer:
    """The run's optimizer, each rank holding the state of its share of the parameters."""
    defaults = dict(job.optimizer.defaults)
    return ZeroRedundancyOptimizer(job.optimizer_groups(module), job.optimizer.factory, **defaults)  # type: ignore[no-any-return]


def zero1_state(prepared: Prepared) -> State:
    """State with the optimizer part of this rank only: `ZeroRedundancyOptimizer.optim` holds just its share."""
    return module_state(prepared.core, prepared.optimizer.optim)  # type: ignore[attr-defined]
