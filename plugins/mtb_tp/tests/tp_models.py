"""Models for tests of strategy `tp`: with biases, a frozen layer and a buffer; and some that it must refuse."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor, nn

from mtb_core import ModelSpec, TrainConfig

WIDTH, HIDDEN, WORDS = 12, 20, 64
ROLES = {"words": "embedding", "stem": "stem", "norm": "norm", "up": "colwise", "down": "rowwise", "head": "head"}


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """It fills itself, under the run's seed."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("scale", torch.ones(()))
        self.blocks[0].up.requires_grad_(False)
        self.blocks[1].norm.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(self.words(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def _spec(build: type[nn.Module] | object, roles: dict[str, str]) -> ModelSpec:
    return ModelSpec(
        build=build,  # type: ignore[arg-type]
        blocks=("blocks.0", "blocks.1"),
        tensor_parallel=lambda name: roles.get(name.rpartition(".")[2]),
        vocab_size=WORDS,
    )


def biased(config: TrainConfig) -> ModelSpec:
    return _spec(Net, ROLES)


def no_plan(config: TrainConfig) -> nn.Module:
    return Net()


def no_stem(config: TrainConfig) -> ModelSpec:
    return _spec(Net, {name: role for name, role in ROLES.items() if role not in ("stem", "head")})


def odd(config: TrainConfig) -> ModelSpec:
    return _spec(lambda: Net(hidden=9), ROLES)


def own_loss(config: TrainConfig) -> ModelSpec:
    import attrs

    return attrs.evolve(_spec(Net, ROLES), loss=lambda output, targets: output.sum())


class Strange(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up = nn.Sequential(nn.Linear(WIDTH, HIDDEN))


def not_linear(config: TrainConfig) -> ModelSpec:
    return _spec(Strange, ROLES)


class Careless(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * F.dropout(torch.ones(WORDS), 0.1)


def careless(config: TrainConfig) -> ModelSpec:
    return _spec(Careless, ROLES)
