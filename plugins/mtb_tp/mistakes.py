"""Mistakes that people make with tensor parallelism, made on purpose: a check that does not see them checks nothing.

Each replaces one function by a wrong one for as long as it is in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor

from mtb_tp import by_hand, explicit
from mtb_tp.explicit import Group
from mtb_tp.layers import LAYERS, part


@attrs.frozen
class Mistake:
    """A mistake in layer `layer`: `name` of `owner`, a module or class, becomes `wrong`. `what` tells people."""

    layer: str
    what: str
    owner: Any
    name: str
    wrong: Callable[..., Any]

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the mistake, and mend it again."""
        right = vars(self.owner)[self.name]
        setattr(self.owner, self.name, self.wrong)
        try:
            yield
        finally:
            setattr(self.owner, self.name, right)


def _no_reduction(x: Tensor, _group: Group) -> Tensor:
    return x


def _biased_rows(x: Tensor, weight: Tensor, bias: Tensor, group: Group) -> Tensor:
    return explicit.leave_rows(F.linear(x, weight, bias), group)


def _biased_sequence(x: Tensor, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor], group: Group) -> Tensor:
    hidden = F.gelu(F.linear(explicit.gather_sequence(x, group), *up))
    return explicit.scatter_sequence(F.linear(hidden, *down), group)


def _own_positions(x: Tensor, group: Group) -> Tensor:
    return part(x, 1, group.rank(), group.size())


def _own_positions_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
    return _own_positions(grads[0], ctx.group), None


def _transposed_parts(name: str, tensors: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Weights cut along their other dimension, and turned to fit: what a loader makes of another layout."""
    splits = LAYERS[name].splits
    out = {}
    for key, full in tensors.items():
        dim = splits[key]
        turned = full.t() if full.dim() == 2 and key.endswith("weight") else full
        out[key] = part(turned, dim, group.rank(), group.size()).clone().requires_grad_()
    return out


def _first_stream(_group: Group) -> int:
    return 0


def _column(layer: str) -> tuple[Mistake, ...]:
    return (
        Mistake(
            layer,
            "backward leaves out the all-reduce of the input's gradient",
            explicit,
            "enter_columns",
            _no_reduction,
        ),
        Mistake(layer, "weights split along the wrong dimension", by_hand, "own_parts", _transposed_parts),
    )


def _row(layer: str) -> tuple[Mistake, ...]:
    return (
        Mistake(layer, "forward leaves out the all-reduce of the output", explicit, "leave_rows", _no_reduction),
        Mistake(layer, "bias added on every rank, before the sum", explicit, "row_linear", _biased_rows),
    )


MISTAKES: tuple[Mistake, ...] = (
    *_column("column"),
    *_row("row"),
    Mistake("row", "weights split along the wrong dimension", by_hand, "own_parts", _transposed_parts),
    *_column("mlp"),
    *_row("mlp"),
    Mistake("sequence", "dropout with the same seed on all ranks", by_hand, "dropout_stream", _first_stream),
    Mistake(
        "sequence",
        "forward leaves out the reduction, each rank keeps its own summand",
        explicit,
        "scatter_sequence",
        _own_positions,
    ),
    Mistake(
        "sequence",
        "gradients of norm and last bias are not summed over ranks",
        explicit,
        "enter_columns",
        _no_reduction,
    ),
    Mistake(
        "sequence",
        "backward of the all-gather keeps the own part, without the sum",
        explicit._GatherSequence,  # noqa: SLF001  (the mistake is made inside of it)
        "backward",
        _own_positions_backward,
    ),
    Mistake("sequence", "bias added on every rank, before the sum", explicit, "sequence_mlp", _biased_sequence),
)
