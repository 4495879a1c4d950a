"""From a model's tensor-parallel roles to torch's ``parallelize_module``, and to plain local parameters after it.

`parallelize_module` makes each split weight a ``DTensor`` and lets layers speak to their neighbours in DTensors. That
suits filling the weights, but neither DistributedDataParallel nor the arithmetic of checkpoints: DDP knows no DTensor,
and FSDP2 on top of one makes strided shards. So, once filled, each parameter is replaced by its local part, and a
layer wraps it in a DTensor again while it computes. What works over data-parallel ranks then sees plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from mtb_core import ConfigError, ModelSpec, Piece, State
from mtb_tp.plugin import TPOptions, must_divide
from mtb_tp.vocab import check_words


@attrs.frozen
class Slot:
    """Place of a rank's part in the whole parameter; `placement` is that over tensor-parallel ranks."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    placement: Placement

    @property
    def split(self) -> bool:
        """True if every tensor-parallel rank holds another part."""
        return self.placement.is_shard()


def roles_of(model: nn.Module, spec: ModelSpec, options: TPOptions) -> dict[str, str]:
    """The role of each module that has one.

    Raises:
        ConfigError: the model names no layers to split, or lacks roles that `options` need.
    """
    named = {} if spec.role is None else _named_roles(model, spec.role)
    present = set(named.values())
    if not {"colwise", "rowwise"} <= present:
        raise ConfigError(
            "strategy 'tp' needs a model that says how its layers are split, and this one does not: its ModelSpec has "
            "no role function with roles 'colwise' and 'rowwise'. Return such a ModelSpec from the factory, use "
            "--model gpt, or another strategy."
        )
    needs = {"sequence_parallel": {"stem", "norm"}, "vocab_parallel_loss": {"embedding", "head", "norm"}}
    for option, roles in needs.items():
        if getattr(options, option) and roles - present:
            missing = ", ".join(f"'{role}'" for role in sorted(roles - present))
            raise ConfigError(
                f"strategy 'tp' has {option}=true, but the model's role function gives no module the role {missing}; "
                f"add it to the ModelSpec, or leave out {option}."
            )
    if options.vocab_parallel_loss and spec.loss is not None:
        raise ConfigError(
            "strategy 'tp' has vocab_parallel_loss=true, but the model's ModelSpec brings a loss of its own, which "
            "would see a part of the logits only; leave out one of the two."
        )
    return named


def _named_roles(model: nn.Module, rule: Callable[[str], str | None]) -> dict[str, str]:
    """A module with several names counts once, but a dropout at each of its places."""
    roles: dict[str, str] = {}
    seen = set()
    for name, module in model.named_modules(remove_duplicate=False):
        role = rule(name)
        if role and (role == "dropout" or id(module) not in seen):
            roles[name] = role
            seen.add(id(module))
    return roles


def parallelize(
    model: nn.Module, mesh: DeviceMesh, roles: Mapping[str, str], blocks: Sequence[str], options: TPOptions
) -> nn.Module:
    """Split `model` over the ranks of `mesh`; tied parameters stay tied. No communication: all ranks hold the same.

    Args:
        blocks: names of the repeated blocks; the norm before the output layer is likely outside of them.

    Raises:
        ConfigError: a layer cannot be split, or not evenly.
    """
    plan = {}
    last_norm = _last_norm(roles, blocks)
    for name, role in roles.items():
        style = _style(role, options, feeds_whole_head=name == last_norm and not options.vocab_parallel_loss)
        module = model.get_submodule(name)
        if style is not None:
            plan[name] = style
            _check_layer(name, role, module, mesh.size())
        elif role == "head":
            module.register_forward_pre_hook(_take_plain)
    ties = _ties(model)
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for first, *others in ties:
        for name in others:
            _set_parameter(model, name, model.get_parameter(first))
    return model


def _last_norm(roles: Mapping[str, str], blocks: Sequence[str]) -> str | None:
    """The norm that probably feeds the output layer. If it is another one, more is communicated, but all is right."""
    norms = [name for name, role in roles.items() if role == "norm"]
    outside = [name for name in norms if not any(name == b or name.startswith(f"{b}.") for b in blocks)]
    candidates = outside or norms
    return candidates[-1] if candidates else None


def _take_plain(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Before an output layer that is not split: what a norm gave as a replicated DTensor becomes a plain tensor."""
    return tuple(a.to_local() if isinstance(a, DTensor) else a for a in args)


def _style(role: str, options: TPOptions, *, feeds_whole_head: bool) -> ParallelStyle | None:
    """Layouts at the borders of a module of `role`. The residual stream itself is plain tensors.

    A norm hands a replicated DTensor to the layers behind it: their input gradients, each a part of a sum, are then
    added up locally, and reduced once. A head that is not split takes the whole sequence as a plain tensor; its input
    gradient is whole on each rank.
    """
    stream: Placement = Shard(1) if options.sequence_parallel else Replicate()
    if role == "colwise":
        return ColwiseParallel()
    if role == "rowwise":
        return RowwiseParallel(output_layouts=stream)
    if role == "norm":
        if feeds_whole_head and not options.sequence_parallel:
            return None
        return PrepareModuleOutput(
            output_layouts=stream, desired_output_layouts=Replicate(), use_local_output=feeds_whole_head
        )
    if role == "stem" and options.sequence_parallel:
        return PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=stream)
    if role == "embedding" and options.vocab_parallel_loss:
        return RowwiseParallel(input_layouts=Replicate())
    if role == "head" and options.vocab_parallel_loss:
        return ColwiseParallel()
    return None


def _check_layer(name: str, role: str, module: nn.Module, tp: int) -> None:
    """Split layers compute by `_wrapping`'s forward, so one that has something of its own would lose it."""
    if role not in ("colwise", "rowwise", "head", "embedding"):
        return
    which = f"the model gives the role '{role}' to '{name}', which is {type(module).__name__}"
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ConfigError(
            f"strategy 'tp' can split nn.Linear and nn.Embedding; {which}. Leave its role out, or use one of the two."
        )
    plain = type(module).forward in (nn.Linear.forward, nn.Embedding.forward) and "forward" not in vars(module)
    if not plain or module._parameters.get("weight") is None:  # noqa: SLF001  (the attribute may be computed)
        raise ConfigError(
            f"strategy 'tp' splits layers that compute as nn.Linear or nn.Embedding do, from a weight of their own; "
            f"{which} and has a forward or a parametrization of its own. Put that into a module around the layer, or "
            "leave its role out."
        )
    unsplittable = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}
    used = [key for key, unset in unsplittable.items() if getattr(module, key, unset) != unset]
    if used:
        raise ConfigError(
            f"strategy 'tp' cannot split an embedding with {', '.join(used)}, for each rank has some of the words only; "
            f"{which}. Leave out {', '.join(used)}, or vocab_parallel_loss."
        )
    dim = 1 if role == "rowwise" else 0
    sides = {"colwise": "outputs", "rowwise": "inputs", "head": "words", "embedding": "words"}
    must_divide(f"{sides[role]} of '{name}'", module.weight.shape[dim], tp, "Change the model's size, or tp.")


def localize(model: nn.Module) -> dict[str, Slot]:
    """Replace each DTensor parameter of `model` by its local part; layers wrap it again while they compute.

    Returns:
        Slots of all parameters, by name; a tied one under its first name.
    """
    slots: dict[str, Slot] = {}
    local: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in local:
            local[id(parameter)], slots[name] = _localized(parameter)
        if isinstance(parameter, DTensor):
            _set_parameter(model, name, local[id(parameter)])
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            kind: Any = type(module)
            module.__class__ = _wrapping(kind)
            layouts = module.__dict__.setdefault("_mtb_layouts", {})
            layouts[leaf] = (parameter.device_mesh, parameter.placements)
    return slots


def _localized(parameter: nn.Parameter) -> tuple[nn.Parameter, Slot]:
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return parameter, Slot(shape, (0,) * len(shape), shape, Replicate())
    (placement,) = parameter.placements
    part = parameter.to_local().detach()
    offset = [0] * len(shape)
    if isinstance(placement, Shard):
        offset[placement.dim] = parameter.device_mesh.get_local_rank() * part.shape[placement.dim]
    own = nn.Parameter(part, requires_grad=parameter.requires_grad)
    return own, Slot(shape, tuple(offset), tuple(part.shape), placement)


@functools.cache  # one class for all layers of a kind
def _wrapping(base: Any) -> type[nn.Module]:
    """A subclass of `base`, Linear or Embedding, that computes with DTensors made of its local parameters."""

    def linear(self: Any, x: DTensor) -> Any:
        return F.linear(x, _distributed(self, "weight"), _distributed(self, "bias"))

    def embedding(self: Any, x: DTensor) -> Any:
        check_words(x.to_local(), self.num_embeddings, "tokens")
        return F.embedding(x, _distributed(self, "weight"), self.padding_idx)

    if getattr(base, "_mtb_wrapping", False):
        return cast("type[nn.Module]", base)
    forward = linear if issubclass(base, nn.Linear) else embedding
    names = {"forward": forward, "_mtb_wrapping": True, "__module__": base.__module__, "__doc__": base.__doc__}
    changed: type[nn.Module] = type(base.__name__, (base,), names)
    return changed


def _distributed(module: nn.Module, leaf: str) -> Any:
    local = getattr(module, leaf)
    if local is None:
        return None
    mesh, placements = module.__dict__["_mtb_layouts"][leaf]
    return DTensor.from_local(local, mesh, placements, run_check=False)


def to_global(state: State, slots: Mapping[str, Slot]) -> State:
    """`state` of local parameters in coordinates of the whole model.

    The parameters' own pieces, and those of optimizer state that has their shape, are moved by what tensor
    parallelism cut off before them; what FSDP cut is in them already.
    """
    return State({key: [_move(piece, _slot(key, slots)) for piece in pieces] for key, pieces in state.pieces.items()})


def _slot(key: str, slots: Mapping[str, Slot]) -> Slot | None:
    kind, _, rest = key.partition("/")
    return slots.get(rest if kind == "model" else rest.rpartition("/")[0])


def _move(piece: Piece, slot: Slot | None) -> Piece:
    if slot is None or not slot.split or piece.shape != slot.local_shape:
        return piece
    return Piece(piece.tensor, slot.shape, tuple(a + b for a, b in zip(piece.offset, slot.offset, strict=True)))


def _ties(module: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    module.get_submodule(owner).register_parameter(leaf, parameter)


def sequence_parameters(model: nn.Module, roles: Mapping[str, str]) -> list[nn.Parameter]:
    """Trainable parameters that, under sequence parallelism, saw only this rank's positions: those of the norms."""
    modules = [model.get_submodule(name) for name, role in roles.items() if role == "norm"]
    return [p for module in modules for p in module.parameters() if p.requires_grad]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The part of the gradient that this rank holds."""
    return None if parameter.grad is None else local_part(parameter.grad)
