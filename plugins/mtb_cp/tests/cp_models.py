"""Models for tests of strategy `cp`: one with a loss, biases and a buffer of its own; and some that it must refuse."""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor, nn

from mtb_core import ModelSpec, TrainConfig

WIDTH, HEADS, WORDS, LENGTH = 12, 2, 64, 8
ROLES = {"stem": "stem", "meet": "attention"}


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, x: Tensor, *, positions: Tensor | None = None) -> Tensor:
        return x + (self.table[: x.shape[1]] if positions is None else self.table[positions])


class Deaf(Stem):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x


class Meet(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class Scaled(Meet):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        return super().forward(2 * q, k, v, dropout)


class Everywhere(Meet):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


class Weighted(Meet):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))


class Block(nn.Module):
    def __init__(self, meet: nn.Module, groups: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.meet, self.groups = meet, groups
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(self.meet(q, k[:, : self.groups], v[:, : self.groups], 0.0).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """It fills itself, under the run's seed, and returns a mean loss; one attention stands in both of its blocks."""

    def __init__(self, stem: nn.Module | None = None, meet: nn.Module | None = None, groups: int = HEADS) -> None:
        super().__init__()
        meet = Meet() if meet is None else meet
        self.words = nn.Embedding(WORDS, WIDTH)
        self.stem = Stem() if stem is None else stem
        self.blocks = nn.ModuleList(Block(meet, groups) for _ in range(2))
        self.again = self.blocks[1]
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.stem(self.words(tokens))
        for block in (*self.blocks, self.again):
            x = block(x)
        logits = self.head(x) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def spec(model: nn.Module, roles: dict[str, str] | None = None) -> ModelSpec:
    named = ROLES if roles is None else roles
    return ModelSpec(
        build=lambda: model,
        blocks=("blocks.0", "blocks.1"),
        role=lambda name: named.get(name.rpartition(".")[2]),
        vocab_size=WORDS,
    )


def own(config: TrainConfig) -> ModelSpec:
    return attrs.evolve(spec(nn.Module()), build=Net)


class Averaging(Net):
    """Its buffer follows the tokens that a rank sees, and what it computes follows the buffer."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            self.scale.lerp_(1 + tokens.float().mean() / WORDS, 0.5)
        return super().forward(tokens, targets)


def averaging(config: TrainConfig) -> ModelSpec:
    return attrs.evolve(spec(nn.Module()), build=Averaging)


def scaled(config: TrainConfig) -> ModelSpec:
    return attrs.evolve(spec(nn.Module()), build=lambda: Net(meet=Scaled()))


def plain(config: TrainConfig) -> nn.Module:
    return Net()
