"""Models that draw random numbers where a run must take care of the streams, and parts with a mode of their own."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Plain(nn.Module):
    """Logits of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


class DrawsInItsLoss(Plain):
    """Drops also in eval mode, as a function without a mode does."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(functional.dropout(self.embed(tokens), 0.1 + 0.1 * np.random.rand() + 0.1 * random.random()))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class FrozenStatistics(Plain):
    """A normalisation whose statistics are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).eval().requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert not self.norm.training
        return self.head(self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2))


class DrawsFromAll(Plain):
    """Begins with numbers of torch, numpy and python."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.head.bias.fill_(np.random.rand() + random.random())


class OfItsProcess(Plain):
    """Begins with a number that no two processes share."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.head.bias.fill_(os.getpid() / 1e7)


_ONLY = Plain()


def one() -> Plain:
    """Always the same model."""
    return _ONLY
