"""A small model of which rank 1 sleeps in one phase of every step: `data`, `forward` and `optimizer` are factories."""

from __future__ import annotations

import os
import time

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

SECONDS = float(os.environ.get("MTB_TEST_SLEEP", "0.2"))

INSTALLED: set[str] = set()


def _here() -> bool:
    return os.environ.get("RANK", "0") == "1"


class Net(nn.Module):
    """A next-token model that may sleep before its forward."""

    def __init__(self, *, sleeps: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.out = nn.Linear(16, 256)
        self.sleeps = sleeps

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.sleeps and _here():
            time.sleep(SECONDS)
        return self.out(self.embedding(tokens))


def forward() -> nn.Module:
    """Sleeps in forward."""
    return Net(sleeps=True)


def optimizer() -> nn.Module:
    """Sleeps before the optimizer's own step."""

    def wait(*_: object) -> None:
        if _here():
            time.sleep(SECONDS)

    if "optimizer" not in INSTALLED:  # a factory may be called more than once
        INSTALLED.add("optimizer")
        register_optimizer_step_pre_hook(wait)
    return Net(sleeps=False)


def data() -> nn.Module:
    """Gets its batches late."""
    from mtb_core.data.loader import Loader

    punctual = Loader.next

    def late(self: Loader) -> object:
        if _here():
            time.sleep(SECONDS)
        return punctual(self)

    if "data" not in INSTALLED:
        INSTALLED.add("data")
        Loader.next = late  # type: ignore[method-assign]
    return Net(sleeps=False)


class Failing(Net):
    """Raises on rank 1 in the third forward."""

    def __init__(self) -> None:
        super().__init__(sleeps=False)
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if _here() and self.calls == 3:
            raise ValueError("boom on rank 1")
        return super().forward(tokens)
