"""Small models with what trips strategies: frozen, unused and odd parameters, buffers, an auxiliary loss."""

from __future__ import annotations

import attrs
import torch
from torch import nn

from mtb_core.api.values import ModelSpec
from mtb_core.api.work import Loss
from mtb_core.config import TrainConfig
from mtb_core.config.schema import IGNORE_LABEL
from mtb_core.model.gpt import gpt_spec


class _Block(nn.Module):
    """A residual block of `width`, through `hidden`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + changed


class Sample(nn.Module):
    """A next-token model of an embedding, two blocks and an output layer."""

    def __init__(self, vocab_size: int, width: int = 7, hidden: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(_Block(width, hidden) for _ in range(2))
        self.out = nn.Linear(width, vocab_size)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Input of the output layer."""
        x: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, length, vocabulary] of `tokens` [batch, length]."""
        logits: torch.Tensor = self.out(self.hidden(tokens))
        return logits


class Frozen(Sample):
    """The first block and one bias are not trained."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.blocks[0].requires_grad_(False)
        self.out.bias.requires_grad_(False)


class Unused(Sample):
    """One layer takes no part."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.idle = nn.Linear(3, 2)


class Odd(Sample):
    """A parameter of a single element, and one with fewer rows than there may be ranks."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, width=7, hidden=3)
        self.shift = nn.Parameter(torch.empty(1))
        self.mix = nn.Parameter(torch.empty(2, 7))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """With the odd parameters in use."""
        x = super().hidden(tokens)
        return x + self.shift + x * self.mix[0] - self.mix[1]


class Scalar(Sample):
    """A parameter without dimensions."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.scale = nn.Parameter(torch.empty(()))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scaled."""
        return super().hidden(tokens) * self.scale


#: What `Buffers` has averaged into ``running`` in this process, in order.
MEANS: list[torch.Tensor] = []


class Buffers(Sample):
    """A persistent buffer that each rank's own samples change, one of whole numbers, and one that is not saved."""

    running: torch.Tensor
    calls: torch.Tensor
    scratch: torch.Tensor

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.register_buffer("running", torch.empty(7))
        self.register_buffer("calls", torch.empty((), dtype=torch.int64))
        self.register_buffer("scratch", torch.empty(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits; the buffers follow what was seen in training."""
        x = self.hidden(tokens)
        if self.training:
            with torch.no_grad():
                MEANS.append(x.detach().float().mean(dim=(0, 1)))
                self.running.lerp_(MEANS[-1], 0.5)
                self.calls.add_(1)
                self.scratch.fill_(1.0)
        logits: torch.Tensor = self.out(x)
        return logits


def _fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    if name in {"running", "calls", "scratch"}:
        tensor.zero_()
    elif name == "scale":
        tensor.fill_(1.0)
    else:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)


def _spec(config: TrainConfig, kind: type[Sample]) -> ModelSpec:
    vocab_size = config.vocab_size or 61
    return ModelSpec(build=lambda: kind(vocab_size), init=_fill, blocks=("blocks.0", "blocks.1"), vocab_size=vocab_size)


def frozen(config: TrainConfig) -> ModelSpec:
    """The model ``kit-frozen``."""
    return _spec(config, Frozen)


def unused(config: TrainConfig) -> ModelSpec:
    """The model ``kit-unused``."""
    return _spec(config, Unused)


def odd(config: TrainConfig) -> ModelSpec:
    """The model ``kit-odd``."""
    return _spec(config, Odd)


def scalar(config: TrainConfig) -> ModelSpec:
    """The model ``kit-scalar``."""
    return _spec(config, Scalar)


def buffers(config: TrainConfig) -> ModelSpec:
    """The model ``kit-buffers``."""
    return _spec(config, Buffers)


def extra(config: TrainConfig) -> ModelSpec:
    """The model ``kit-extra``: the built-in one, with an auxiliary loss and a metric; its modules have their roles."""
    return attrs.evolve(gpt_spec(config), loss=_loss_with_extra, metrics=("log_partition",))


def _loss_with_extra(output: torch.Tensor, targets: torch.Tensor) -> Loss:
    logits, wanted = output.reshape(-1, output.shape[-1]).float(), targets.reshape(-1)
    valid = wanted != IGNORE_LABEL
    partition = torch.logsumexp(logits, -1)[valid]
    return Loss(
        torch.nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORE_LABEL, reduction="sum"),
        extra=partition.square().sum() / 8,
        metrics={"log_partition": partition.detach().sum()},
    )
