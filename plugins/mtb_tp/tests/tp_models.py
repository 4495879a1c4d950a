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
        role=lambda name: roles.get(name.rpartition(".")[2]),
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


class Careless(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * F.dropout(torch.ones(WORDS), 0.1)


def careless(config: TrainConfig) -> ModelSpec:
    return _spec(Careless, ROLES)


class HiddenBlock(Block):
    """`Careless`, but at first nothing in front of `down`, which begins as zeros, has a gradient."""

    def __init__(self) -> None:
        super().__init__(HIDDEN)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)
        self.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.5)


class Hidden(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HiddenBlock() for _ in range(2))


def hidden(config: TrainConfig) -> ModelSpec:
    return _spec(Hidden, ROLES)


class Late(Net):
    """Ranks come to different values of what they share, though their gradients agree: it shows in values alone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls == 3:
            with torch.no_grad():
                self.stem.weight.add_(0.01 * torch.distributed.get_rank())
        return super().forward(tokens)


def late(config: TrainConfig) -> ModelSpec:
    return _spec(Late, ROLES)


class Uneven(Net):
    """Rank 1 alone uses a parameter that ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(self.words(tokens))
        if torch.distributed.get_rank() == 1:
            x = x + self.extra(x)
        return self.head(self.norm(x))


def uneven(config: TrainConfig) -> ModelSpec:
    return _spec(Uneven, ROLES)


class UnevenNorm(Net):
    """Rank 1 alone uses a norm, whose gradient sequence parallelism sums."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH)})

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        if torch.distributed.get_rank() == 1:
            out = out + 0 * (self.extra["norm"].weight.sum() + self.extra["norm"].bias.sum())
        return out


def uneven_norm(config: TrainConfig) -> ModelSpec:
    return _spec(UnevenNorm, ROLES)


class Dropping(Net):
    """Each block calls its dropout twice."""

    def __init__(self, kind: type[nn.Module] = nn.Dropout) -> None:
        super().__init__()
        for block in self.blocks:
            block.drop = kind(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(self.words(tokens))
        for block in self.blocks:
            x = block.drop(block.drop(block(x)))
        return self.head(self.norm(x))


def dropout_twice(config: TrainConfig) -> ModelSpec:
    return _spec(Dropping, {**ROLES, "drop": "dropout"})


def alpha_dropout(config: TrainConfig) -> ModelSpec:
    return _spec(lambda: Dropping(nn.AlphaDropout), {**ROLES, "drop": "dropout"})


class NormFirst(Net):
    """The norm before the output layer is defined before all others, and nothing says what the blocks are."""

    def __init__(self) -> None:
        super().__init__()
        blocks = self.blocks
        del self.blocks
        self.blocks = blocks


def norm_first(config: TrainConfig) -> ModelSpec:
    import attrs

    return attrs.evolve(_spec(NormFirst, ROLES), blocks=())


class Average(Net):
    """A buffer follows the activations of this rank's samples, and the loss follows the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(self.words(tokens))
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.detach().mean((0, 1)), alpha=0.5)
        x = x - 3 * self.mean
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def average(config: TrainConfig) -> ModelSpec:
    return _spec(Average, ROLES)


class Scalar(Net):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.factor


def scalar(config: TrainConfig) -> ModelSpec:
    return _spec(Scalar, ROLES)


class FewWords(Net):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS // 2, WIDTH)


def few_words(config: TrainConfig) -> ModelSpec:
    import attrs

    return attrs.evolve(_spec(FewWords, ROLES), vocab_size=None)
