"""Choice of the units, which are gathered, freed and reduced together. The rest belongs to the root."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from mtb_core import ConfigError
from mtb_fsdp.theory import Unit

log = logging.getLogger("mtb.fsdp")

#: Modules that are never called, so that no hook would gather what is in them.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def choose_units(module: nn.Module, blocks: Sequence[str], wrap: str, wrap_size: int = 0) -> list[str]:
    """Names of the units in `module` besides the root, each after those inside it.

    A module that shares a parameter with modules outside of it is no unit: tied parameters must be gathered together,
    which the root does for them. A module that appears under several names is one unit.
    """
    if wrap == "root":
        return []
    shared = _shared_with_outside(module)
    if wrap == "block":
        if not blocks:
            log.warning("The model names no blocks to shard one by one, so it is gathered as a whole (wrap=root).")
        candidates = sorted(blocks, key=lambda name: -name.count("."))
    else:
        candidates = list(_of_size(module, wrap_size, shared))
    out: dict[int, str] = {}
    for name in candidates:
        found = module.get_submodule(name)
        if found is not module and not shared(found) and next(found.parameters(), None) is not None:
            out.setdefault(id(found), name)
    return list(out.values())


def check_dtypes(module: nn.Module, units: Sequence[str], ignored: Iterable[nn.Parameter] = ()) -> None:
    """Gradients of one unit travel in one buffer, so its trainable parameters must have one dtype.

    Raises:
        ConfigError: they have several.
    """
    for name, parameters in unit_parameters(module, units, ignored).items():
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for _, p in parameters if p.requires_grad})
        if len(dtypes) > 1:
            raise ConfigError(
                f"The trainable parameters of {f'module {name!r}' if name else 'the model'} have dtypes {', '.join(dtypes)}, but "
                "those that are sharded together must have one; convert the model (float32 is what mixed precision "
                "starts from), or choose units that have one each with wrap=auto-size."
            )


def unit_parameters(
    module: nn.Module, units: Sequence[str], ignored: Iterable[nn.Parameter] = ()
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Parameters by unit, those of the root last under an empty name; a tied parameter once, an ignored one not."""
    taken = {id(p) for p in ignored}
    out: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for unit in (*units, ""):
        prefix = f"{unit}." if unit else ""
        found = [(prefix + n, p) for n, p in module.get_submodule(unit).named_parameters() if id(p) not in taken]
        taken.update(id(p) for _, p in found)
        out[unit] = found
    return out


def describe_units(
    module: nn.Module, units: Sequence[str], *, resharded: bool, ignored: Iterable[nn.Parameter] = ()
) -> list[Unit]:
    """The units as `mtb_fsdp.theory` counts them; parameters without dimensions are not sharded and left out."""
    return [
        Unit(
            shapes=tuple(tuple(p.shape) for _, p in parameters if p.dim()),
            trainable=tuple(p.requires_grad for _, p in parameters if p.dim()),
            resharded=resharded and bool(name),
        )
        for name, parameters in unit_parameters(module, units, ignored).items()
    ]


def without_views(unit: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG001  (a forward hook)
    """A unit's output, of which no tensor is a view; a single linear layer's is one.

    An operation in place on a view drops FSDP's hook on it, and backward would use parameters that are not gathered.
    The copy costs no memory that stays: nobody else keeps what was viewed.
    """
    return tree_map_only(torch.Tensor, _copy_of_view, output) if torch.is_grad_enabled() else output


def _copy_of_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.requires_grad and tensor._base is not None else tensor  # noqa: SLF001


class _shared_with_outside:  # noqa: N801  (used like a function)
    """True if a submodule of `module` shares a parameter with modules outside of it."""

    def __init__(self, module: nn.Module) -> None:
        self._owners: dict[int, set[int]] = {}
        for owner in module.modules():
            for parameter in owner.parameters(recurse=False):
                self._owners.setdefault(id(parameter), set()).add(id(owner))

    def __call__(self, submodule: nn.Module) -> bool:
        inside = {id(m) for m in submodule.modules()}
        return any(not self._owners[id(p)] <= inside for p in submodule.parameters())


def _of_size(module: nn.Module, size: int, shared: _shared_with_outside) -> Iterable[str]:
    """Names of modules that hold `size` parameters or more besides those of units inside them, innermost first."""
    left: dict[int, int] = {}

    def visit(found: nn.Module, name: str) -> Iterable[str]:
        if id(found) in left:
            return
        left[id(found)] = sum(p.numel() for p in found.parameters(recurse=False))
        for child_name, child in found.named_children():
            new = id(child) not in left
            yield from visit(child, f"{name}.{child_name}" if name else child_name)
            left[id(found)] += left[id(child)] if new else 0
        if name and left[id(found)] >= size and not isinstance(found, _CONTAINERS) and not shared(found):
            left[id(found)] = 0
            yield name

    return visit(module, "")
