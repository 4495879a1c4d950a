"""Cutting of a model into stages, and the module of each stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from mtb_core import ConfigError, ModelSpec
from mtb_pp.plugin import check_stages


@attrs.frozen
class Cut:
    """The cut of a model; the same on every rank.

    Attributes:
        parts: by stage, the names of the chain's modules in it, in order.
        tied: by name, the stages of each parameter that several of them hold.
        sizes: by stage, the number of its parameters; one that is tied counts in each stage that holds it.
    """

    parts: tuple[tuple[str, ...], ...]
    tied: Mapping[str, tuple[int, ...]]
    sizes: tuple[int, ...]


def cut(model: nn.Module, spec: ModelSpec, *, pp: int, virtual: int, world: int) -> Cut:
    """Cut `model` into ``pp * virtual`` stages of equal numbers of blocks, the earlier ones with one more if need be.

    What stands before the first block belongs to the first stage, and what follows a block to the stage of that block.
    In a chain without blocks each module that has parameters counts as one.

    Args:
        model: the whole model; its tensors may be on ``meta``.
        pp: ranks of the pipeline; stage i is on rank ``i % pp`` of it.
        virtual: stages on each rank.
        world: number of all ranks.

    Raises:
        ConfigError: the model cannot be cut so.
    """
    if not spec.chain:
        raise ConfigError(
            f"strategy 'pp' cannot cut the model ({type(model).__name__}), for its ModelSpec has no chain: the names of the "
            "modules whose composition is forward. Give the ModelSpec one, or use another strategy."
        )
    stages = pp * virtual
    blocks = [i for i, name in enumerate(spec.chain) if name in spec.blocks] or [
        i for i, name in enumerate(spec.chain) if next(model.get_submodule(name).parameters(), None) is not None
    ]
    check_stages(len(blocks), "blocks", pp=pp, virtual=virtual, world=world)
    starts = [0, *(blocks[-(-len(blocks) * stage // stages)] for stage in range(1, stages)), len(spec.chain)]
    parts = tuple(spec.chain[start:end] for start, end in itertools.pairwise(starts))
    found = Cut(parts, _tied(model, parts), tuple(sum(p.numel() for p in _parameters(model, part)) for part in parts))
    _check_parameters(model, parts)
    for name, holders in found.tied.items():
        ranks = [stage % pp for stage in holders]
        if len(set(ranks)) < len(ranks):
            raise ConfigError(
                f"strategy 'pp': the parameter '{name}' is shared by stages {', '.join(map(str, holders))}, of which two are on "
                "one rank; use schedule=1f1b, which has one stage on each rank."
            )
    return found


class Part(nn.Module):
    """One stage: some modules of a model under the names that they have there; called, it runs them in order.

    A parameter that the model first names in a module of another stage (tied weights) has that name here too. So
    weights are filled alike and saved alike wherever they are.

    Args:
        chain: names of the modules.
        sent: dtype in which the output travels to the next stage; None: there is none.
    """

    def __init__(self, model: nn.Module, chain: Sequence[str], sent: torch.dtype | None) -> None:
        super().__init__()
        self._sent = sent
        modules = dict(model.named_modules(remove_duplicate=False))
        order = {name: index for index, name in enumerate(modules)}
        own = {id(p) for p in _parameters(model, chain)}
        inside = {name for name, _ in _named_parameters(model, chain)}
        for name, parameter in model.named_parameters():
            if id(parameter) in own and name not in inside:
                _owner(self, name).register_parameter(name.rpartition(".")[2], parameter)
        for name in sorted(set(chain), key=order.__getitem__):  # so that a tied parameter's first name is the model's
            _owner(self, name).add_module(name.rpartition(".")[2], modules[name])
        self._steps = tuple(modules[name] for name in chain)

    def forward(self, x: Tensor) -> Tensor:
        """Input of the next stage; from the last stage, the model's output."""
        for step in self._steps:
            x = step(x)
        return x if self._sent is None else x.to(self._sent).contiguous()


def together(parts: Sequence[nn.Module]) -> nn.Module:
    """One module that has the modules of all `parts` of a rank under their names in the model; it is not called."""
    if len(parts) == 1:
        return parts[0]
    out = nn.Module()
    for part in parts:
        _merge(out, part)
    return out


def _merge(into: nn.Module, other: nn.Module) -> None:
    for name, parameter in other.named_parameters(recurse=False):
        into.register_parameter(name, parameter)
    for name, child in other.named_children():
        there = into._modules.get(name)  # noqa: SLF001  (getattr would find methods too)
        if there is None or type(child) is not nn.Module:
            into.add_module(name, child)
        else:
            mixed = nn.Module()
            _merge(mixed, there)
            _merge(mixed, child)
            into.add_module(name, mixed)


def _owner(root: nn.Module, name: str) -> nn.Module:
    """The module in `root` that is to own what is called `name`; made where it is missing."""
    for step in name.split(".")[:-1]:
        if step not in root._modules:  # noqa: SLF001
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    return root


def _named_parameters(model: nn.Module, chain: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
    for name in chain:
        for inner, parameter in model.get_submodule(name).named_parameters(remove_duplicate=False):
            yield f"{name}.{inner}", parameter


def _parameters(model: nn.Module, chain: Sequence[str]) -> list[nn.Parameter]:
    """Parameters of the modules of `chain`, each once."""
    return list({id(p): p for _, p in _named_parameters(model, chain)}.values())


def _tied(model: nn.Module, parts: Sequence[Sequence[str]]) -> dict[str, tuple[int, ...]]:
    holders: dict[int, list[int]] = {}
    for stage, part in enumerate(parts):
        for parameter in _parameters(model, part):
            holders.setdefault(id(parameter), []).append(stage)
    return {name: tuple(holders[id(p)]) for name, p in model.named_parameters() if len(holders.get(id(p), ())) > 1}


def _check_parameters(model: nn.Module, parts: Sequence[Sequence[str]]) -> None:
    """The chain has every parameter and every buffer that is saved, and each stage has something to train."""
    inside: set[int] = set()
    for stage, part in enumerate(parts):
        parameters = _parameters(model, part)
        if not any(p.requires_grad for p in parameters):
            raise ConfigError(
                f"strategy 'pp': stage {stage} of {len(parts)} ({part[0]} to {part[-1]}) has no trainable parameter; use "
                "fewer stages."
            )
        inside.update(map(id, parameters))
        inside.update(id(b) for name in part for b in model.get_submodule(name).buffers())
    persistent = model.state_dict(keep_vars=True)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in inside and name in persistent:
            raise ConfigError(
                f"strategy 'pp': '{name}' is in no module of the model's chain, so no stage would have it. Put it into one, "
                "or use another strategy."
            )
