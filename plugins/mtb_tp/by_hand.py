"""The checked layers as `mtb_tp.explicit` has them, on one rank's parts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mtb_tp import explicit
from mtb_tp.explicit import Group
from mtb_tp.layers import LAYERS, Settings, dropout_generator, part


def own_parts(name: str, tensors: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """This rank's parts of the whole `tensors` of layer `name`, as leaves of a graph."""
    splits = LAYERS[name].splits
    return {
        key: part(full, splits[key], group.rank(), group.size()).clone().requires_grad_()
        for key, full in tensors.items()
    }


def dropout_stream(group: Group) -> int:
    """Whose random stream this rank uses in the sequence region: its own."""
    return group.rank()


def run_layer(name: str, leaves: Mapping[str, Tensor], settings: Settings, group: Group) -> Tensor:
    """Forward of layer `name`; returns this rank's part of the output."""
    x = leaves["x"]
    if name == "column":
        return explicit.column_linear(x, leaves["weight"], leaves["bias"], group)
    if name == "row":
        return explicit.row_linear(x, leaves["weight"], leaves["bias"], group)
    up, down = ((leaves[f"{side}_weight"], leaves[f"{side}_bias"]) for side in ("up", "down"))
    if name == "mlp":
        return explicit.mlp(x, up, down, group)
    generator = dropout_generator(settings, dropout_stream(group))
    norm = (leaves["norm_weight"], leaves["norm_bias"])
    x = explicit.sequence_norm_dropout(x, *norm, settings.dropout, generator, group)
    return explicit.sequence_mlp(x, up, down, group)
