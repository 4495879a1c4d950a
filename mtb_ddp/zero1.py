"""ZeRO stage 1 through torch's ZeroRedundancyOptimizer: optimizer state is split over ranks, parameter by parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mtb_core import Job, Prepared, State, module_state


def make_zero1(job: Job, module: nn.Module) -> torch.optim.Optimizer:
    """The run's optimizer, each rank holding the state of its share of the parameters."""
    # Imported here because it compiles torch's functional optimizers, which takes longer than building the model.
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415

    return ZeroRedundancyOptimizer(job.optimizer_groups(module), job.optimizer.factory, **job.optimizer.defaults)


def zero1_state(prepared: Prepared) -> State:
    """State with the optimizer part of this rank only: `ZeroRedundancyOptimizer.optim` holds just its share."""
    optimizer: Any = prepared.optimizer
    return module_state(prepared.core, optimizer.optim)
