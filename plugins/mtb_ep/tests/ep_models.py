"""Models for tests of strategy `ep`: experts of a user's own, fixed routing, and gradients that go wrong on one rank."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtb_core import ModelSpec, TrainConfig
from mtb_ep.model import moe
from mtb_ep.plugin import MoEOptions

WIDTH, WORDS, EXPERTS = 12, 64, 6


class Mixed(nn.Module):
    """Experts that are linear layers with biases."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(experts, WIDTH) * 0.3)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        expert = torch.arange(len(counts)).repeat_interleave(counts)
        return torch.tanh((rows[:, None] @ self.weight[expert]).squeeze(1) + self.bias[expert])


class Net(nn.Module):
    """It fills itself. A token goes to the expert of its number; both blocks share one weight, one bias is frozen."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.experts = experts
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.ModuleDict({"experts": Mixed(experts)}) for _ in range(2))
        self.blocks[1]["experts"].weight = self.blocks[0]["experts"].weight
        self.blocks[0]["experts"].bias.requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        expert = (tokens % self.experts).flatten()
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=self.experts)
        x = self.words(tokens).flatten(0, 1)
        for block in self.blocks:
            x = x + torch.zeros_like(x).index_copy(0, order, block["experts"](x[order], counts))
        return self.head(x.view(*tokens.shape, WIDTH))


def _spec(build: Any) -> ModelSpec:
    return ModelSpec(build=build, role=lambda name: "experts" if name.endswith(".experts") else None, vocab_size=WORDS)


def own(config: TrainConfig) -> ModelSpec:
    return _spec(Net)


def five(config: TrainConfig) -> ModelSpec:
    return _spec(lambda: Net(5))


def without(config: TrainConfig) -> ModelSpec:
    return attrs.evolve(_spec(Net), role=None)


OPTIONS = MoEOptions(experts=4, top_k=2, d_ff=24)


def crowded(config: TrainConfig) -> ModelSpec:
    """All logits are equal for good, so all tokens go to experts 0 and 1, which rank 0 has."""
    spec = moe(config, OPTIONS)

    def build() -> nn.Module:
        model = spec.build()
        for block in model.blocks:
            block.moe.router.requires_grad_(False)
        return model

    def init(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if "router" in name:
            tensor.zero_()
        else:
            assert spec.init is not None
            spec.init(name, tensor, generator)

    return attrs.evolve(spec, build=build, init=init)


def spoiled(config: TrainConfig) -> ModelSpec:
    """From step 2 on the gradients of rank 1 are infinite, with losses that are right."""
    spec, calls = moe(config, OPTIONS), [0]

    def loss(output: Any, targets: Tensor) -> Any:
        logits, figures = output
        calls[0] += torch.is_grad_enabled()
        if logits.requires_grad and calls[0] > 1 and dist.get_rank() == 1:
            logits = logits.view_as(logits)
            logits.register_hook(lambda gradient: gradient * float("inf"))
        assert spec.loss is not None
        return spec.loss((logits, figures), targets)

    return attrs.evolve(spec, loss=loss)
