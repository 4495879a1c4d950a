"""Building the model of a trial, and what must hold of it before a strategy takes it apart."""

from __future__ import annotations

import weakref

import torch
import xxhash
from torch import nn

from mtb_core.api.errors import ConfigError, RunFailed
from mtb_core.api.values import ModelSpec, RankContext
from mtb_core.config import ResolvedRun
from mtb_core.model import services
from mtb_core.ranks.agree import gather_objects

#: Models of earlier trials of this process, as far as something still holds them.
_USED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class ModelBuild:
    """Builds the whole model for the strategy, and looks at it before the strategy takes any part of it away.

    Attributes:
        parameters: elements of all parameters, tied ones once; 0 before the first call.
    """

    def __init__(self, spec: ModelSpec, resolved: ResolvedRun, ctx: RankContext) -> None:
        self.parameters = 0
        self._spec, self._resolved, self._ctx = spec, resolved, ctx
        self._built: weakref.ref[nn.Module] | None = None  # a strategy may keep a part of it only
        self._digests: dict[str, str] = {}

    def __call__(self) -> nn.Module:
        """The model, filled if it fills itself.

        Raises:
            ConfigError: it is the one that an earlier trial has trained.
            RunFailed: it has tied parameters, with which the strategy cannot deal.
        """
        module = services.build_module(self._spec, self._resolved.config.seed, self._ctx.device)
        if module in _USED:
            raise ConfigError(
                "The model's factory returned the model that an earlier trial has trained. Every trial of --repeat begins "
                "anew: build the model inside the factory, or run the trials as separate commands."
            )
        self._built, self.parameters = weakref.ref(module), count_parameters(module)
        if self._spec.init is None and self._ctx.world_size > 1:
            self._digests = _digests(module)
        if not self._resolved.plan.tied_weights:
            _refuse_tied(module, self._resolved.config.strategy)
        return module

    def check_equal(self) -> None:
        """See that a model which fills itself began with the same numbers on all ranks. Called by all of them.

        Raises:
            RunFailed: on all ranks, naming the first tensor that differs, and two ranks.
        """
        if self._ctx.world_size == 1 or self._spec.init is not None:
            return
        whole = xxhash.xxh3_128_hexdigest(repr(self._digests).encode())
        if len(set(gather_objects(self._ctx, whole))) == 1:
            return
        everybody = gather_objects(self._ctx, self._digests)
        for rank, found in enumerate(everybody):
            differ = (n for n in everybody[0].keys() | found.keys() if everybody[0].get(n) != found.get(n))
            if (name := min(differ, key=[*everybody[0], *found].index, default=None)) is not None:
                raise RunFailed(
                    f"The model begins with other numbers on rank {rank} than on rank 0, '{name}' first. Ranks would "
                    "train a mixture of models. Fill it from torch's, numpy's or python's global random streams, which "
                    "are seeded alike while it is built, and from nothing that is a process's own.",
                    agreed=True,
                )

    def used_up(self) -> None:
        """The trial is over: no other one may train this model again."""
        module = None if self._built is None else self._built()
        if module is not None:
            _USED.add(module)


def count_parameters(module: nn.Module) -> int:
    """Elements of all parameters, by their global shapes; tied ones once."""
    return sum(p.numel() for p in module.parameters())


def _digests(module: nn.Module) -> dict[str, str]:
    """Digest of the bytes of each parameter and buffer that is in memory, by name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: _digest(t.detach()) for name, t in named if t.layout is torch.strided and not t.is_meta}


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(data.numpy())  # type: ignore[arg-type]  # numpy is a buffer


def _refuse_tied(module: nn.Module, strategy: str) -> None:
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise RunFailed(
                f"The parameters '{first}' and '{name}' of the model are one, and strategy '{strategy}' with these options "
                "cannot train tied weights. Untie them, or use another strategy.",
                agreed=True,
            )
