"""Learning-rate schedules: pure functions of the number of completed steps. They keep no state of their own.

"Warm-up" here is that of the learning rate; it has nothing to do with the benchmark's warm-up steps, which merely
are not measured.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mtb_core.config.schema import TrainConfig

if TYPE_CHECKING:
    import torch


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of the optimizer step that follows `step` completed ones (0 before the first).

    ``constant``: always the configured rate. ``cosine``: warm-up over W steps, rate * (step + 1) / W, so that the
    first step is not lost and step W has the full rate; then half a cosine from the rate at W completed steps to the
    minimum at D completed steps (``lr_decay_steps``); the minimum from there on.
    """
    peak, floor = config.learning_rate, config.min_learning_rate
    if config.lr_scheduler == "constant":
        return peak
    if config.lr_decay_steps is None:
        raise ValueError("The cosine schedule needs lr_decay_steps; use a resolved configuration.")
    if step < config.lr_warmup_steps:
        return peak * (step + 1) / config.lr_warmup_steps
    if step >= config.lr_decay_steps:
        return floor
    progress = (step - config.lr_warmup_steps) / (config.lr_decay_steps - config.lr_warmup_steps)
    return floor + (peak - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0


class LearningRate:
    """Writes the schedule's rate into an optimizer's groups.

    A group whose ``initial_lr`` differs from the configured rate follows the same curve, scaled by their ratio.
    """

    def __init__(self, config: TrainConfig, optimizer: torch.optim.Optimizer) -> None:
        self._config = config
        self._optimizer = optimizer

    def set(self, step: int) -> float:
        """Set every group's ``lr`` for the step that follows `step` completed ones; returns the first group's."""
        rate, peak = learning_rate(self._config, step), self._config.learning_rate
        groups = self._optimizer.param_groups
        for group in groups:
            base = group["initial_lr"]
            group["lr"] = rate if base == peak else base * (rate / peak)
        return float(groups[0]["lr"])
