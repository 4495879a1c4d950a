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

from mtb_core import ConfigError, RunFailed


class SharedMasks:
    """The number from which a micro-batch's masks follow; equal on all ranks of `group`.

    `active` says whether anything uses it.
    """

    def __init__(self, group: dist.ProcessGroup, device: str, *, active: bool) -> None:
        self._group, self._device, self.active = group, device, active
        self._number = 0
        self._used: set[str] = set()

    def renew(self) -> None:
        """Draw a new number; one broadcast of 8 bytes. Every rank's own stream moves on alike."""
        self._used.clear()
        drawn = torch.randint(2**62, (), dtype=torch.int64).to(self._device)
        dist.broadcast(drawn, group=self._group, group_src=0)
        self._number = int(drawn)

    def generator(self, place: str, device: torch.device) -> torch.Generator:
        """A stream that depends on the number and on `place` only.

        Raises:
            RunFailed: the micro-batch's forward has asked for it already, and would drop the same elements again.
        """
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001  (as torch.utils.checkpoint asks)
        if not in_backward:  # there, only a block that activation checkpointing runs again may ask, for the same mask
            if place in self._used:
                raise RunFailed(
                    f"The dropout '{place}' was called twice in one forward. Where tensor-parallel ranks share "
                    "activations its mask follows from its name, so both calls would drop the same elements. Give the "
                    "model one nn.Dropout for each place where it drops."
                )
            self._used.add(place)
        digest = hashlib.blake2b(f"{self._number}/{place}".encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


class SharedDropout(nn.Dropout):
    """Dropout with a mask that is the same on all ranks that share `masks`. Called once a forward."""

    def __init__(self, p: float, inplace: bool, masks: SharedMasks, place: str) -> None:
        super().__init__(p, inplace)
        self._masks, self._place = masks, place

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements with probability p and scale the others by 1 / (1 - p); in training only."""
        if not self.training or not self.p:
            return x
        generator = self._masks.generator(self._place, x.device)
        keep = torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p, generator=generator)
        return x.mul_(keep).div_(1 - self.p) if self.inplace else x * keep / (1 - self.p)


def share_dropout(model: nn.Module, roles: Mapping[str, str], group: dist.ProcessGroup, device: str) -> SharedMasks:
    """Replace every dropout on the residual stream by a shared one; returns the source of their masks.

    One module that stands in several places becomes several, with masks of their own.

    Raises:
        ConfigError: a module with the role drops in another way than nn.Dropout does.
    """
    modules = {name: model.get_submodule(name) for name, role in roles.items() if role == "dropout"}
    dropouts: dict[str, nn.Dropout] = {}
    for name, module in modules.items():
        if isinstance(module, nn.Identity):
            continue
        if not isinstance(module, nn.Dropout) or type(module).forward is not nn.Dropout.forward:
            raise ConfigError(
                f"strategy 'tp' can give nn.Dropout the same mask on all ranks; the model gives the role 'dropout' to "
                f"'{name}', which is {type(module).__name__} and drops in its own way. Use nn.Dropout there."
            )
        dropouts[name] = module
    masks = SharedMasks(group, device, active=any(module.p for module in dropouts.values()))
    for name, module in dropouts.items():
        model.set_submodule(name, SharedDropout(module.p, module.inplace, masks, name))
    return masks
