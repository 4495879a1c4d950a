"""The small model that the checkpoints in ``data`` are of."""

import random

import numpy as np
import torch
from torch import nn

from mtb_core import State, module_state


class Training:
    """A model with AdamW, to be filled from a checkpoint or saved as one."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Tanh(), nn.Linear(7, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def state(self) -> State:
        return module_state(self.model, self.optimizer)

    def load(self, manager, path, **kwargs):
        loaded = manager.load(path, self.state(), **kwargs)
        loaded.restore_random(manager.ctx)
        return loaded

    def weights(self):
        return {name: parameter.tolist() for name, parameter in self.model.named_parameters()}


def draw():
    """A number of each stream."""
    return torch.rand(1), np.random.rand(), random.random()
