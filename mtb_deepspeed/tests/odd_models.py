"""Small models that ZeRO might stumble over: odd sizes, tied, frozen and unused parameters, buffers, errors."""

from __future__ import annotations

import os

import torch
from torch import nn

VOCABULARY = 23


class Odd(nn.Module):
    """Next-token model with sizes that no number of ranks divides, a tied and a frozen layer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 7)
        self.frozen = nn.Linear(7, 5)
        self.frozen.requires_grad_(False)
        self.mix = nn.Parameter(torch.full((5, 3, 7), 0.1))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.out = nn.Linear(7, VOCABULARY)
        self.out.weight = self.embedding.weight
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += int(self.training)
        hidden = self.embedding(tokens)
        narrow = torch.tanh(self.frozen(hidden))
        if not self.skips():
            hidden = hidden + self.scale * torch.einsum("btf,fkh->bth", narrow, self.mix)
        return self.trouble(self.out(hidden))

    def skips(self) -> bool:
        return False

    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def here(self, call: int = 3) -> bool:
        """On rank 1, at `call`."""
        return os.environ.get("RANK", "0") == "1" and self.calls == call


class Normalised(Odd):
    """With running statistics, which differ between ranks until they are brought together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(VOCABULARY)
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return self.norm(logits.float().flatten(0, 1)).view_as(logits)


class UnusedOnOne(Odd):
    def skips(self) -> bool:
        return self.here()


class UnusedEverywhere(Odd):
    def skips(self) -> bool:
        return True


class NaNOnce(Odd):
    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * float("nan") if self.here() else logits


class Raises(Odd):
    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        if self.here():
            raise ValueError("boom-r1")
        return logits
