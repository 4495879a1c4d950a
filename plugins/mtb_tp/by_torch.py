"""The checked layers as torch has them: modules under ``parallelize_module``, activations as ``DTensor``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mtb_tp.explicit import keep_mask
from mtb_tp.layers import LAYERS, Settings, dropout_generator, part

_MODULES = {"weight": "linear", "up_weight": "up", "down_weight": "down", "norm_weight": "norm"}


class TorchLayer:
    """Layer `name` on this rank of `mesh`.

    Outputs stay DTensors between the layers: only so does torch know sizes that do not divide evenly.
    """

    def __init__(self, name: str, tensors: Mapping[str, Tensor], settings: Settings, mesh: DeviceMesh) -> None:
        self._name, self._settings, self._mesh = name, settings, mesh
        self._module = _module(tensors)
        parallelize_module(self._module, mesh, _styles(name), src_data_rank=None)
        full, dim = tensors["x"], LAYERS[name].splits["x"]
        self._x = part(full, dim, mesh.get_local_rank(), mesh.size()).clone().requires_grad_()
        self._shape, self._stride = full.shape, full.stride()
        self._split = dim

    def forward(self) -> Tensor:
        """This rank's part of the output."""
        module: Any = self._module
        x: Any = DTensor.from_local(
            self._x, self._mesh, self._placement(), run_check=False, shape=self._shape, stride=self._stride
        )
        if self._name in ("column", "row"):
            out = module.linear(x)
        else:
            if self._name == "sequence":
                x = self._dropped(module.norm(x))
            out = module.down(F.gelu(module.up(x)))
        local: Tensor = out.to_local()
        return local

    def finish_backward(self) -> None:
        """Sum what DTensor leaves as summands: gradients of parameters that ranks hold in common."""
        for parameter in self._module.parameters():
            gradient: Any = parameter.grad
            assert isinstance(parameter, DTensor)
            parameter.grad = gradient.redistribute(placements=parameter.placements)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's parts of all gradients, by tensor."""
        found: dict[str, Any] = {"x": self._x.grad}
        for key, owner in _MODULES.items():
            layer = getattr(self._module, owner, None)
            if layer is not None:
                found[key] = layer.weight.grad.to_local()
                found[key.replace("weight", "bias")] = layer.bias.grad.to_local()
        return found

    def _placement(self) -> tuple[Any, ...]:
        return (Replicate() if self._split is None else Shard(self._split % len(self._shape)),)

    def _dropped(self, x: DTensor) -> DTensor:
        """Dropout of this rank's positions with this rank's stream: torch has one for DTensors on CUDA only."""
        p = self._settings.dropout
        if not p:
            return x
        local = x.to_local()
        mask = keep_mask(local, p, dropout_generator(self._settings, self._mesh.get_local_rank()))
        return DTensor.from_local(local * mask / (1 - p), self._mesh, x.placements, run_check=False)


def _module(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module that holds the whole tensors, the same on every rank."""
    holder = nn.Module()
    for key, owner in _MODULES.items():
        if key in tensors:
            weight = tensors[key]
            layer: nn.Module = nn.LayerNorm(weight.shape[0]) if weight.dim() == 1 else nn.Linear(1, 1)
            layer.weight = nn.Parameter(weight.clone())
            layer.bias = nn.Parameter(tensors[key.replace("weight", "bias")].clone())
            holder.add_module(owner, layer)
    return holder


def _styles(name: str) -> dict[str, ParallelStyle]:
    if name == "column":
        return {"linear": ColwiseParallel(use_local_output=False)}
    if name == "row":
        return {"linear": RowwiseParallel(use_local_output=False)}
    if name == "mlp":
        return {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    return {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
