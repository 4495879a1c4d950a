"""Small models that go wrong in one way each, on one rank and at one call, for tests of what a run makes of it."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn

VOCABULARY = 256


class Net(nn.Module):
    """A next-token model of 8,720 parameters; subclasses go wrong in `trouble`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.extra = nn.Linear(16, 16)
        self.out = nn.Linear(16, VOCABULARY)
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.embedding(tokens)
        return self.trouble(self.out(hidden + self.extra(hidden) if self.uses_extra() else hidden))

    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def uses_extra(self) -> bool:
        return True

    def here(self, call: int = 3) -> bool:
        """On the last of two ranks, at `call`."""
        return os.environ.get("RANK", "0") == "1" and self.calls == call


class NaNLoss(Net):
    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * float("nan") if self.here() else logits


class Hangs(Net):
    """Has the launcher asked to stop, and asked again."""

    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        if self.here():
            while True:
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(0.1)
        return logits


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


class InfiniteGradient(Net):
    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return _InfiniteGradient.apply(logits) if self.calls >= 3 and os.environ.get("RANK", "0") == "1" else logits


class NaNOnce(Net):
    """In one process, so on rank 0."""

    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * float("nan") if self.calls == 3 else logits


class UnusedEverywhere(Net):
    def uses_extra(self) -> bool:
        return False


class UnusedOnOne(Net):
    def uses_extra(self) -> bool:
        return not self.here()


class Raises(Net):
    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        if self.here():
            raise ValueError("boom-r1")
        return logits


class RaisesOnce(Raises):
    """In the first attempt only."""

    def here(self, call: int = 3) -> bool:
        return super().here(call) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


class LeavesByExit(Net):
    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        if self.here():
            sys.exit(3)
        return logits


class LeavesAtOnce(Net):
    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        if self.here():
            os._exit(5)
        return logits


class UnitGradient(nn.Module):
    """Its loss is its only weight, so that every micro-batch's gradient is exactly 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.weight * 1.0


class FirstTokenLoss(nn.Module):
    """Its loss for a sample is the sample's first token, as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        real = targets[:, 0] != -100
        return (tokens[:, 0].float() * real).sum() / real.sum().clamp(min=1) + 0.0 * self.weight


class OtherIgnoreLabel(Net):
    """Makes its own loss, with another label for targets that do not count."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Normalised(Net):
    """With running statistics, which differ between ranks until they are brought together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(VOCABULARY)

    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        return self.norm(logits.flatten(0, 1)).view_as(logits)


class LeavesQuietly(Net):
    def trouble(self, logits: torch.Tensor) -> torch.Tensor:
        if self.calls == 3:
            sys.exit(0)
        return logits
