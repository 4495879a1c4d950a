"""Dropout on activations that tensor-parallel ranks hold in common.

Each rank draws from its own random stream, which is right wherever ranks hold different activations: attention
weights of different heads, and, under sequence parallelism, different positions of the residual stream. Where they
hold the same ones, they must drop the same, or what should be one activation becomes several.

The masks of a micro-batch follow from one number that the group's first rank draws and broadcasts, and from the
place of the dropout in the model. So nothing but the ranks' own streams is state, and a block that activation
checkpointing runs again gets the same mask again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SharedMasks:
    """The number from which a micro-batch's masks follow; equal on all ranks of `group`.

    `active` says whether anything uses it.
    """

    def __init__(self, group: dist.ProcessGroup, device: str, *, active: bool) -> None:
        self._group, self._device, self.active = group, device, active
        self._number = 0

    def renew(self) -> None:
        """Draw a new number; one broadcast of 8 bytes. Every rank's own stream moves on alike."""
        drawn = torch.randint(2**62, (), dtype=torch.int64).to(self._device)
        dist.broadcast(drawn, group=self._group, group_src=0)
        self._number = int(drawn)

    def generator(self, place: str, device: torch.device) -> torch.Generator:
        """A stream that depends on the number and on `place` only."""
        digest = hashlib.blake2b(f"{self._number}/{place}".encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


class SharedDropout(nn.Dropout):
    """Dropout with a mask that is the same on all ranks that share `masks`. Called once a forward."""

    def __init__(self, p: float, masks: SharedMasks, place: str) -> None:
        super().__init__(p)
        self._masks, self._place = masks, place

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements with probability p and scale the others by 1 / (1 - p); in training only."""
        if not self.training or not self.p:
            return x
        generator = self._masks.generator(self._place, x.device)
        keep = torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p, generator=generator)
        return x * keep / (1 - self.p)


def share_dropout(model: nn.Module, roles: Mapping[str, str], group: dist.ProcessGroup, device: str) -> SharedMasks:
    """Replace every dropout on the residual stream by a shared one; returns the source of their masks."""
    places = [name for name, role in roles.items() if role == "dropout"]
    modules = {name: model.get_submodule(name) for name in places}
    rates = {name: module.p for name, module in modules.items() if isinstance(module, nn.Dropout)}
    masks = SharedMasks(group, device, active=any(rates.values()))
    for name, rate in rates.items():
        model.set_submodule(name, SharedDropout(rate, masks, name))
    return masks
