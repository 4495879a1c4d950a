"""Models for tests of strategy `pp`: with what trips pipelines; and some that it must refuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mtb_core import ModelSpec, TrainConfig

WIDTH, WORDS, BLOCKS = 12, 256, 3
CHAIN = ("words", *(f"blocks.{i}" for i in range(BLOCKS)), "head")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three blocks; a chain, so it may be cut anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        for name in CHAIN:
            x = self.get_submodule(name)(x)
        return x


def _init(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.is_floating_point() and tensor.dim():
        tensor.normal_(0.0, 0.2, generator=generator)
    else:
        tensor.zero_()


def _spec(net: Net, **changes: Any) -> ModelSpec:
    given: dict[str, Any] = {
        "build": lambda: net,
        "blocks": tuple(f"blocks.{i}" for i in range(BLOCKS)),
        "chain": CHAIN,
        "vocab_size": WORDS,
    }
    return ModelSpec(**{**given, **changes})


def no_chain(config: TrainConfig) -> ModelSpec:
    return _spec(Net(), chain=())


class Odd(Net):
    """Biases, something frozen, a parameter without dimensions, outputs that do not lie in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.requires_grad_(False)
        self.blocks[2].scale = nn.Parameter(torch.ones(()))
        self.blocks[2].register_forward_hook(lambda module, _, out: out * (1 + module.scale))
        self.head.bias.requires_grad_(False)
        for block in self.blocks:
            block.register_forward_hook(lambda _, __, out: out.transpose(1, 2).contiguous().transpose(1, 2))


def odd(config: TrainConfig) -> ModelSpec:
    return ModelSpec(build=Odd, init=_init, blocks=tuple(f"blocks.{i}" for i in range(BLOCKS)), chain=CHAIN)


class Following(Block):
    """A persistent buffer follows what was seen in training, and takes part; another counts calls of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1)
            if self.training:
                self.mean.lerp_(x.detach().mean(dim=(0, 1)), 0.1)
        return super().forward(x - self.mean.clone())


class Buffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Following() for _ in range(BLOCKS))


def buffers(config: TrainConfig) -> ModelSpec:
    return ModelSpec(build=Buffers, init=_init, blocks=tuple(f"blocks.{i}" for i in range(BLOCKS)), chain=CHAIN)


def repeated(config: TrainConfig) -> ModelSpec:
    """One block, called three times: every stage has it."""
    net = Net()
    net.blocks = nn.ModuleList([net.blocks[0]] * BLOCKS)
    return _spec(net)


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.how == "raise":
            raise KeyError("backward of the middle block")
        return gradient * float("nan"), None


class Breaking(Block):
    """From its 4th call on it does something else."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.register_parameter("spare", nn.Parameter(torch.ones(2)) if how == "unused" else None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls < 4:
            return super().forward(x)
        if self.how == "forward":
            try:
                raise LookupError("the reason")
            except LookupError as reason:
                raise ValueError("forward of the middle block") from reason
        if self.how == "nan":
            return super().forward(x) * float("nan")
        if self.how == "gradient":
            return _Broken.apply(super().forward(x), "nan")
        if self.how == "backward":
            return _Broken.apply(super().forward(x), "raise")
        return super().forward(x)


def _breaking(how: str) -> ModelSpec:
    net = Net()
    net.blocks[1] = Breaking(how)
    return _spec(net)


def fails_forward(config: TrainConfig) -> ModelSpec:
    return _breaking("forward")


def fails_backward(config: TrainConfig) -> ModelSpec:
    return _breaking("backward")


def nan_loss(config: TrainConfig) -> ModelSpec:
    return _breaking("nan")


def nan_gradient(config: TrainConfig) -> ModelSpec:
    return _breaking("gradient")


def unused(config: TrainConfig) -> ModelSpec:
    return _breaking("unused")


def stray(config: TrainConfig) -> ModelSpec:
    net = Net()
    net.offset = nn.Parameter(torch.zeros(WIDTH))
    return _spec(net)


def stray_buffer(config: TrainConfig) -> ModelSpec:
    net = Net()
    net.register_buffer("offset", torch.zeros(WIDTH))
    return _spec(net)


def frozen(config: TrainConfig) -> ModelSpec:
    net = Net()
    net.blocks[1].requires_grad_(False)
    return _spec(net)


class Pair(Block):
    def forward(self, x: Any) -> Any:
        return x, x


def pair(config: TrainConfig) -> ModelSpec:
    net = Net()
    net.blocks[0] = Pair()
    return _spec(net)


class Looking(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool((x > 0).any()) else x


def looking(config: TrainConfig) -> ModelSpec:
    net = Net()
    net.blocks[0] = Looking()
    return _spec(net)
