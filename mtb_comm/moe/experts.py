"""Experts: small MLPs, d -> f -> d with GELU and biases."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor, nn

from .seeds import generator

#: The parameters of an expert, in the order of `expert_weights`.
PARAMETERS = ("up", "up_bias", "down", "down_bias")


def expert_weights(seed: int, expert: int, hidden: int, ffn: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """First weights of one expert; they depend on (seed, expert) alone, so any rank may own it."""
    random = generator(seed, "expert", expert)
    return tuple(
        torch.randn(shape, generator=random).mul_(scale).to(dtype)
        for shape, scale in (((hidden, ffn), hidden**-0.5), ((ffn,), 0.1), ((ffn, hidden), ffn**-0.5), ((hidden,), 0.1))
    )


def mlp(rows: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """One expert on rows [n, d]."""
    return F.gelu(rows @ up + up_bias) @ down + down_bias


class Experts(nn.Module):
    """The experts that one rank owns, ``first`` to ``first + count - 1``; `count` may be 0."""

    def __init__(self, first: int, count: int, *, seed: int, hidden: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.count = count
        made = [expert_weights(seed, first + i, hidden, ffn, dtype) for i in range(count)]
        for name, *tensors in zip(PARAMETERS, *made, strict=True) if made else ():
            self.register_parameter(name, nn.Parameter(torch.stack(tensors)))

    def forward(self, rows: Tensor, per_expert: Sequence[int]) -> Tensor:
        """Rows [n, d], sorted by expert, through their experts.

        Every expert is run, also on no row at all: its gradients are then zeros rather than missing. A rank without
        experts gives the rows (there are none) back, so that the backward pass still comes through here.
        """
        if not self.count:
            return rows
        # Unbound once: indexing would make each expert's gradient as large as all of them.
        weights = zip(*(self.get_parameter(name).unbind(0) for name in PARAMETERS), strict=True)
        parts = rows.split(list(per_expert))
        return torch.cat([mlp(part, *own) for part, own in zip(parts, weights, strict=True)])
