"""A small model whose loss spikes where a batch has a marked sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

MARK = 250


class Spiking(nn.Module):
    """A next-token model; the loss of a batch in which a target is `MARK` is twenty times what it would be."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.out = nn.Linear(16, 256)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.out(self.embedding(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss * torch.where((targets == MARK).any(), 20.0, 1.0)
