"""The optimizer of a run: which parameters, and how it is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mtb_core.api.errors import ConfigError
from mtb_core.api.values import OptimizerRecipe
from mtb_core.config.schema import TrainConfig

#: Device types for which torch has fused kernels of the optimizers below.
_FUSED_DEVICES = ("cpu", "cuda")


def optimizer_groups(module: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Parameter groups of `module`'s trainable parameters: first those with weight decay, then those without.

    Decay applies to parameters of two or more dimensions, by their global shape, so that every strategy and world
    size makes the same groups. A group without parameters is left out. Frozen parameters are in none. Each group
    carries ``initial_lr``, from which the schedule computes ``lr``.

    Raises:
        ConfigError: nothing is trainable.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            (decayed if parameter.dim() >= 2 else others).append(parameter)
    if not decayed and not others:
        raise ConfigError(
            f"The model ({type(module).__name__}) has no trainable parameter; at least one must have requires_grad."
        )
    return [group for group in _groups(decayed, others, config) if group["params"]]


def _groups(decayed: list[nn.Parameter], others: list[nn.Parameter], config: TrainConfig) -> list[dict[str, Any]]:
    rate = {"lr": config.learning_rate, "initial_lr": config.learning_rate}
    return [
        {"params": decayed, "weight_decay": config.weight_decay, **rate},
        {"params": others, "weight_decay": 0.0, **rate},
    ]


def described_groups(recipe: OptimizerRecipe, config: TrainConfig, rate: float) -> list[dict[str, Any]]:
    """The JSON values of both parameter groups as the run's recipe makes them, with the learning rate `rate`.

    For checkpoints, where they must be equal on all ranks: a rank of a pipeline may have no parameters for one of the
    groups, and a strategy may make its optimizer with other kernels.
    """
    optimizer = recipe.factory(
        _groups([nn.Parameter(torch.zeros(1, 1))], [nn.Parameter(torch.zeros(1))], config), **recipe.defaults
    )
    plain = (bool, int, float, str, list, tuple)
    return [
        {**{key: value for key, value in group.items() if key != "params" and isinstance(value, plain)}, "lr": rate}
        for group in optimizer.param_groups
    ]


def adamw(config: TrainConfig, device: str) -> OptimizerRecipe:
    """AdamW as configured; settings that the configuration does not name have torch's default (betas 0.9 and 0.999)."""
    return OptimizerRecipe(torch.optim.AdamW, {**_common(config, device), "eps": config.adam_eps})


def sgd(config: TrainConfig, device: str) -> OptimizerRecipe:
    """SGD as configured."""
    return OptimizerRecipe(torch.optim.SGD, {**_common(config, device), "momentum": config.momentum})


def _common(config: TrainConfig, device: str) -> dict[str, Any]:
    """Fused where torch has the kernel, otherwise ``foreach``."""
    fused = torch.device(device).type in _FUSED_DEVICES
    return {"lr": config.learning_rate, "fused": True} if fused else {"lr": config.learning_rate, "foreach": True}
