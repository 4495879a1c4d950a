"""Experts of this rank: its parts of their parameters, the way to those of other ranks, and global coordinates.

Parameters are split as ``DTensor`` on ``meta``, so that they are filled like any other; then each is replaced by its
local part, a plain tensor. DistributedDataParallel and optimizers see plain tensors only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mtb_comm import Exchange, Splits, through_experts
from mtb_core import ConfigError, ModelSpec, Piece, State
from mtb_ep.plugin import check_degree


@attrs.frozen
class Slot:
    """The place of a rank's part in an expert parameter: whole shape, first expert, and how many experts."""

    shape: tuple[int, ...]
    first: int
    count: int


@attrs.define
class Sharing:
    """The exchange of one rank with those that have the other experts.

    Attributes:
        imbalances: of each forward so far: the most rows that one of these ranks computed, over their mean.
    """

    exchange: Exchange
    imbalances: list[float] = attrs.field(factory=list)

    def compute(self, experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [n, d] of this rank's tokens, sorted by expert, through the experts of all ranks; called by all ranks.

        Args:
            experts: ``experts(rows, counts)`` computes this rank's experts.
            counts: int64 [all experts], this rank's rows for each.
        """
        exchange = self.exchange
        everyone = exchange.gather(counts)
        host = everyone.view(exchange.ranks, exchange.ranks, -1).cpu()  # [from, to, expert of the latter]
        mine = host[:, exchange.rank]
        loads = host.sum(dim=(0, 2))
        self.imbalances.append(float(loads.max()) * exchange.ranks / max(float(loads.sum()), 1.0))
        splits = Splits(host[exchange.rank].sum(dim=1).tolist(), mine.sum(dim=1).tolist(), mine.sum(dim=0).tolist())
        own = len(splits.own)
        received = everyone[:, exchange.rank * own : (exchange.rank + 1) * own]
        return through_experts(rows, received, splits, exchange, lambda r, n: experts(r, torch.tensor(n)))


def split_experts(core: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> dict[str, Slot]:
    """Leave each rank of `mesh` its part of the experts of `core`; tied parameters stay tied. No communication.

    Returns:
        Slots of the parameters that were split, by name; a tied one under each of its names.

    Raises:
        ConfigError: `core` has no experts, or they cannot be shared evenly.
    """
    modules = [n for n, _ in core.named_modules() if spec.role is not None and spec.role(n) == "experts"]
    if not modules:
        raise ConfigError(
            "strategy 'ep' needs a model with experts, and this one names none: its ModelSpec has no role function that "
            "gives a module the role 'experts'. Return such a ModelSpec from the factory, use --model moe, or another "
            "strategy."
        )
    slots: dict[str, Slot] = {}
    parts: dict[int, nn.Parameter] = {}
    for name, parameter in list(core.named_parameters(remove_duplicate=False)):
        if not any(name.startswith(f"{module}.") for module in modules):
            continue
        if parameter.dim() == 0:
            raise ConfigError(
                f"strategy 'ep': the first dimension of an expert parameter must be the expert, and '{name}' has none."
            )
        experts = parameter.shape[0]
        check_degree(mesh.size(), experts)
        count = experts // mesh.size()
        slots[name] = slot = Slot(tuple(parameter.shape), mesh.get_local_rank() * count, count)
        if id(parameter) not in parts:
            parts[id(parameter)] = _part(parameter, slot, mesh)
        _set_parameter(core, name, parts[id(parameter)])
    return slots


def _part(parameter: nn.Parameter, slot: Slot, mesh: DeviceMesh) -> nn.Parameter:
    part: Tensor
    if parameter.is_meta:
        local = torch.empty(slot.count, *slot.shape[1:], dtype=parameter.dtype, device="meta")
        part = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    else:  # the model has filled itself
        part = parameter.detach()[slot.first : slot.first + slot.count].clone()
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def localize(core: nn.Module, slots: Mapping[str, Slot]) -> None:
    """Replace the split parameters of `core`, which are filled now, by their local parts."""
    local: dict[int, nn.Parameter] = {}
    for name in slots:
        parameter = core.get_parameter(name)
        if isinstance(parameter, DTensor):
            if id(parameter) not in local:
                own: Tensor = parameter.to_local()
                local[id(parameter)] = nn.Parameter(own.detach(), requires_grad=parameter.requires_grad)
            _set_parameter(core, name, local[id(parameter)])


def share_experts(core: nn.Module, spec: ModelSpec, sharing: Sharing) -> None:
    """Let the experts of `core` compute the rows of all ranks that `sharing` has."""
    assert spec.role is not None
    for name, module in core.named_modules():
        if spec.role(name) == "experts":
            kind: Any = type(module)
            module.__class__ = _shared(kind)
            module.__dict__["_mtb_sharing"] = sharing


@functools.cache  # one class for all experts of a kind
def _shared(base: Any) -> type[nn.Module]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: Any, rows: Tensor, counts: Tensor) -> Tensor:
        sharing: Sharing = self.__dict__["_mtb_sharing"]
        return sharing.compute(functools.partial(base.forward, self), rows, counts)

    names = {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__}
    changed: type[nn.Module] = type(base.__name__, (base,), names)
    return changed


def to_global(state: State, slots: Mapping[str, Slot]) -> State:
    """`state` of local parameters in coordinates of the whole model.

    The parameters' own pieces are moved, and those of optimizer state that has their shape.
    """
    return State({key: [_move(piece, _slot(key, slots)) for piece in pieces] for key, pieces in state.pieces.items()})


def _slot(key: str, slots: Mapping[str, Slot]) -> Slot | None:
    kind, _, rest = key.partition("/")
    return slots.get(rest if kind == "model" else rest.rpartition("/")[0])


def _move(piece: Piece, slot: Slot | None) -> Piece:
    if slot is None or piece.shape != (slot.count, *slot.shape[1:]):
        return piece
    return Piece(piece.tensor, slot.shape, (slot.first, *piece.offset[1:]))


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    module.get_submodule(owner).register_parameter(leaf, parameter)
