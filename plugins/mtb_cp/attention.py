"""Changes to a model whose ranks share sequences: attention sees other ranks' keys, the stem gets its positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor, nn

from mtb_core import ConfigError, ModelSpec, RunFailed

#: ``attend(q, k, v, dropout)``: causal attention over the ranks, of tensors [batch, heads, positions, features].
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]

#: Largest difference allowed between a model's own attention and causal scaled dot-product attention, in fp32.
_TOLERANCE = 1e-4


class ContextAttention(nn.Module):
    """Stands in the place of a model's attention, and computes the same over the positions of all ranks.

    Before its first forward it tries the module that it replaces, for what else that may compute would be lost.
    """

    def __init__(self, name: str, replaced: nn.Module, attend: Attend) -> None:
        super().__init__()
        self._name, self._attend = name, attend
        self._untried: tuple[nn.Module, ...] = (replaced,)  # in a tuple, so that it is no submodule

    def forward(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Causal attention of this rank's queries; all of [batch, heads, positions, features]."""
        for replaced in self._untried:
            _check_replaced(self._name, replaced, q, k, v)
        self._untried = ()
        kind = q.device.type
        if torch.is_autocast_enabled(kind):  # so that keys and values are cast before they travel
            dtype = torch.get_autocast_dtype(kind)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        return self._attend(q, k, v, dropout)


def _check_replaced(name: str, replaced: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> None:
    """`replaced` computes causal attention.

    Raises:
        RunFailed: it computes something else. It sees the same numbers on all ranks, so all of them raise.
    """
    who = f"strategy 'cp' replaces '{name}' ({type(replaced).__name__}), to which the model gives the role 'attention',"
    if not q.shape == k.shape == v.shape or q.dim() != 4:
        raise RunFailed(
            f"{who} and which is called with queries, keys and values of the shapes {list(q.shape)}, {list(k.shape)} and "
            f"{list(v.shape)}; they must have one shape [batch, heads, length, features]. Repeat keys and values that "
            "heads have in common before the call."
        )
    generator = torch.Generator().manual_seed(0)
    trial = torch.randn(3, 1, *q.shape[1:], generator=generator).to(q.device)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        seen = replaced(*trial, 0.0)
        wanted = F.scaled_dot_product_attention(trial[0], trial[1], trial[2], is_causal=True)
    if seen.shape != wanted.shape or not torch.allclose(seen.float(), wanted, rtol=0, atol=_TOLERANCE):
        raise RunFailed(
            f"{who} by causal scaled dot-product attention, but it computes something else: another scale or mask, "
            "say. Scale queries before the call, or give the module no role and use another strategy."
        )


def share_attention(core: nn.Module, spec: ModelSpec, attend: Attend, positions: Sequence[int], device: str) -> None:
    """Let the attention of `core` see the keys of all ranks, and give its stem this rank's `positions`.

    Raises:
        ConfigError: the model does not say where these are, or they are not made for it. All ranks raise it.
    """
    roles = {name: spec.role(name) for name, _ in core.named_modules(remove_duplicate=False)} if spec.role else {}
    places: dict[str, list[str]] = {"attention": [], "stem": []}
    for name, role in roles.items():
        if role in places:
            places[role].append(name)
    missing = " and ".join(f"'{role}'" for role, names in places.items() if not names)
    if missing:
        raise ConfigError(
            "strategy 'cp' needs a model that says where positions meet (role 'attention') and where they are given "
            f"(role 'stem'), and this one names no module for {missing}. Return a ModelSpec with such a role function "
            "from the factory, use --model gpt, or another strategy; cp=1 takes any model."
        )
    for name in places["attention"]:
        module = core.get_submodule(name)
        if isinstance(module, ContextAttention):
            continue  # what contains it has several names
        if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
            raise ConfigError(
                f"strategy 'cp' replaces what has the role 'attention', and '{name}' ({type(module).__name__}) has "
                "parameters or buffers, which would be lost. Give the role to a module inside of it that is called with "
                "(q, k, v, dropout) and has none."
            )
        core.set_submodule(name, ContextAttention(name, module, attend))
    give = _GivePositions(torch.tensor(positions, dtype=torch.int64, device=device))
    for stem in {id(m): m for m in map(core.get_submodule, places["stem"])}.values():
        if not _takes_positions(stem):
            raise ConfigError(
                f"strategy 'cp' gives positions to what has the role 'stem', and the forward of {type(stem).__name__} "
                "takes no keyword 'positions'. Add it (int64 [length]; None: the first ones), or leave out the role."
            )
        stem.register_forward_pre_hook(give, with_kwargs=True)


class _GivePositions:
    """A forward pre-hook that adds the keyword ``positions``."""

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "positions": self._positions}


def _takes_positions(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.name == "positions" or p.kind is p.VAR_KEYWORD for p in parameters)
