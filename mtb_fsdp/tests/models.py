"""Small models with something special each. They initialise themselves, unless they come with an `init`."""

from __future__ import annotations

import itertools
import os
import time

import torch
from torch import nn

from mtb_core import ModelSpec

VOCABULARY, WIDTH = 256, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 7)  # 7 rows do not divide
        self.outer = nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.calls = 0

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))


class FrozenBlock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].inner.requires_grad_(False)


class FrozenStart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tokens.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


class TiedBlocks(Net):
    """Two blocks share a weight, and the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].inner.weight = self.blocks[0].inner.weight
        self.head.weight = self.tokens.weight


class InPlace(Net):
    """What a block returns is a view (a linear layer's of more than two dimensions), and is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x


class BlockTwice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]


class Temperature(Net):
    """Has parameters without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.blocks[1].register_parameter("gain", nn.Parameter(torch.tensor(1.5)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens) * self.blocks[1].gain) * self.temperature


class Normalised(Net):
    """Keeps running statistics, which differ between ranks: rank r adds r to what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.hidden(tokens)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def filled_normalised() -> ModelSpec:
    """`Normalised` that is filled by name, buffers included."""
    return ModelSpec(Normalised, init=_fill, blocks=("blocks.0", "blocks.1", "blocks.2"))


def _fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith("running_var") or "norm.weight" in name:
        tensor.fill_(1.0)
    elif not tensor.is_floating_point() or "running_mean" in name:
        tensor.zero_()
    else:
        tensor.normal_(0.0, 0.3, generator=generator)


class Unused(Net):
    """A parameter of a block is used on no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_parameter("idle", nn.Parameter(torch.ones(5, 3)))


class UnusedOnRank1(Net):
    """A parameter of a block is not used on rank 1, from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_parameter("extra", nn.Parameter(torch.ones(WIDTH)))
        self.blocks[1].forward = self._forward

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[1]
        used = os.environ.get("RANK", "0") != "1" or self.calls < 2
        return Block.forward(block, x) * (block.extra if used else 1.0)


class BlockUnusedOnRank1(Net):
    """A whole block is left out on rank 1, from the second call on."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.tokens(tokens)
        for index, block in enumerate(self.blocks):
            if index != 1 or os.environ.get("RANK", "0") != "1" or self.calls < 2:
                x = block(x)
        return x


_serials = itertools.count()
_trained: set[int] = set()  # serial numbers of models that were called: one a trial


class BlockUnusedInTrials(Net):
    """A block is left out by all ranks in the first trial, by rank 1 alone in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.serial = next(_serials)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        _trained.add(self.serial)
        x = self.tokens(tokens)
        for index, block in enumerate(self.blocks):
            if index != 1 or not (len(_trained) == 1 or os.environ.get("RANK", "0") == "1"):
                x = block(x)
        return x


class LateWithoutBlock(Net):
    """All ranks leave a block out in training; rank 1 comes seconds later."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.blocks[2](self.blocks[0](self.tokens(tokens)))
        if os.environ.get("RANK", "0") == "1" and self.calls == 2:
            time.sleep(3.0)
        return x


class OutsideItsBlock(Net):
    """Uses a block's weight outside of the block."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().hidden(tokens) @ self.blocks[0].inner.weight.t() @ self.blocks[0].outer.weight.t()


class CallsForward(Net):
    """Calls a block's `forward` instead of the block."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks[1].forward(self.tokens(tokens))


class NaNOnce(Net):
    """Gives NaN on rank 1 at the fourth call."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = super().forward(tokens)
        return out * float("nan") if os.environ.get("RANK", "0") == "1" and self.calls == 4 else out


class TwoDtypes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].outer.bfloat16()
