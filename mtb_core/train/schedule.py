"""Learning-rate schedules: pure functions of the number of completed steps. They keep no state of their own.

"Warm-up" here is that of the learning rate; it has nothing to do with the benchmark's warm-up steps, which merely
are not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mtb_core.config.schema import TrainConfig

if TYPE_CHECKING:
    import torch

#: The rate of the optimizer step that follows so many completed ones.
Schedule = Callable[[int], float]


def constant(config: TrainConfig) -> Schedule:
    """Always the configured rate."""
    return partial(_constant, config.learning_rate)


def cosine(config: TrainConfig) -> Schedule:
    """Linear warm-up, then half a cosine down to the minimum.

    Over W warm-up steps the rate is ``rate * (step + 1) / W``, so that the first step is not lost and step W has the
    full rate. Then it falls from the rate at W completed steps to the minimum at D completed steps
    (``lr_decay_steps``), and stays there.
    """
    if config.lr_decay_steps is None:
        raise ValueError("The cosine schedule needs lr_decay_steps; use a resolved configuration.")
    return partial(_cosine, config)


def _constant(rate: float, _step: int) -> float:
    return rate


def _cosine(config: TrainConfig, step: int) -> float:
    peak, floor, warm, decay = (
        config.learning_rate,
        config.min_learning_rate,
        config.lr_warmup_steps,
        config.lr_decay_steps,
    )
    assert decay is not None
    if step < warm:
        return peak * (step + 1) / warm
    if step >= decay:
        return floor
    progress = (step - warm) / (decay - warm)
    return floor + (peak - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0


class LearningRate:
    """Writes the schedule's rate into an optimizer's groups.

    A group whose ``initial_lr`` differs from the configured rate `peak` follows the same curve, scaled by their ratio.
    """

    def __init__(self, peak: float, schedule: Schedule, optimizer: torch.optim.Optimizer) -> None:
        self._peak, self._schedule = peak, schedule
        self._optimizer = optimizer

    def set(self, step: int) -> float:
        """Set every group's ``lr`` for the step that follows `step` completed ones; returns the first group's."""
        rate, peak = self._schedule(step), self._peak
        groups = self._optimizer.param_groups
        for group in groups:
            base = group["initial_lr"]
            group["lr"] = rate if base == peak else base * (rate / peak)
        return float(groups[0]["lr"])
