"""Small models that ZeRO might stumble over: odd sizes, tied, frozen and unused parameters, buffers, errors."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class Frozen(Odd):
    """Whose logits depend much on what is not trained."""

    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + 20 * self.frozen.weight.flatten()[:VOCABULARY]


class UnusedInTheLast(Odd):
    """In the second of two micro-batches of each step."""

    def skips(self) -> bool:
        return self.training and self.calls % 2 == 0


class Reentrant(Odd):
    """With checkpointing in the form that hides from the graph what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(VOCABULARY, VOCABULARY)

    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, logits, use_reentrant=True)


class Empty(Odd):
    """With a parameter that has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.ones(0, 7))

    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + self.nothing.sum()


class Double(Odd):
    """With a parameter that is not fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(VOCABULARY, dtype=torch.float64))

    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * self.factor.to(logits.dtype)


class Expanded(Odd):
    """With buffers whose elements do not lie one behind the other; large, so that writing behind them shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(1, VOCABULARY).expand(4096, VOCABULARY), persistent=False)
        self.register_buffer("turned", torch.arange(2.0 * VOCABULARY).view(2, VOCABULARY).t())

    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * self.ones[4095] + self.turned[:, 1] - self.turned[:, 0]


class NaNOnce(Odd):
    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * float("nan") if self.here() else logits


class Raises(Odd):
    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        if self.here():
            raise ValueError("boom-r1")
        return logits
