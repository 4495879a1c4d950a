"""Tensor and sequence parallelism by hand: four conjugate pairs of communication, and layers made of them.

A layer whose weights are split over n ranks computes on each rank a part of what one process would compute. All that
has to be added are collectives at the seams, and the insight of Megatron-LM (Shoeybi et al. 2019; Korthikanti et al.
2022 for sequences) is that they come in pairs: what forward does at a seam decides what backward must do there.

===================  =========================  =========================
seam                 forward                    backward
===================  =========================  =========================
`enter_columns`      nothing                    all-reduce of the gradient
`leave_rows`         all-reduce of the output   nothing
`gather_sequence`    all-gather                 reduce-scatter
`scatter_sequence`   reduce-scatter             all-gather
===================  =========================  =========================

The first two go with activations that every rank holds whole. The last two take their place where the activations
between layers are cut along the sequence: the same bytes travel (an all-reduce is a reduce-scatter and an all-gather),
but layer norm, dropout and their memory are shared too.

Tensors are [batch, sequence, features] or [batch, features]; weights as in ``torch.nn.Linear``, [out, in]. Every
function takes this rank's part and is called by all ranks of `group`. Parts are those of ``torch.chunk``: features
need not divide evenly; the sequence must.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor

Group = dist.ProcessGroup


def _summed(x: Tensor, group: Group) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _gathered(x: Tensor, group: Group) -> Tensor:
    """Parts of dimension 1, in rank order. The collective stacks along dimension 0, hence the transposes."""
    parts = x.transpose(0, 1).contiguous()
    out = parts.new_empty(parts.shape[0] * group.size(), *parts.shape[1:])
    dist.all_gather_single(out, parts, group=group)
    return out.transpose(0, 1)


def _scattered_sum(x: Tensor, group: Group) -> Tensor:
    """This rank's part, along dimension 1, of the sum over ranks."""
    parts = x.transpose(0, 1).contiguous()
    out = parts.new_empty(parts.shape[0] // group.size(), *parts.shape[1:])
    dist.reduce_scatter_single(out, parts, group=group)
    return out.transpose(0, 1)


class _EnterColumns(torch.autograd.Function):
    """Each rank uses all of x for its own columns, so the gradient of x is the sum of what the ranks find."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _LeaveRows(torch.autograd.Function):
    """Each rank holds one summand of the output; the gradient of a summand is that of the sum."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherSequence(torch.autograd.Function):
    """Every rank uses all positions; the gradient of this rank's positions is a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered_sum(grads[0], ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    """Each rank holds one summand of all positions and keeps the sum of its own ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _scattered_sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


def enter_columns(x: Tensor, group: Group) -> Tensor:
    """`x` as it is; in backward its gradient is summed over ranks."""
    out: Tensor = _EnterColumns.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def leave_rows(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' `x`; in backward the gradient passes."""
    out: Tensor = _LeaveRows.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """[B, T / n, d] -> [B, T, d]; in backward a reduce-scatter."""
    out: Tensor = _GatherSequence.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """[B, T, d], a summand -> [B, T / n, d] of the sum; in backward an all-gather."""
    out: Tensor = _ScatterSequence.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """Whole `x` -> this rank's output features. `weight` [out / n, in] and `bias` [out / n] are parts."""
    return F.linear(enter_columns(x, group), weight, bias)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """This rank's input features -> whole output. `weight` [out, in / n] is a part; `bias` [out] is whole.

    The bias is added after the sum: before it, it would count n times.
    """
    out = leave_rows(F.linear(x, weight), group)
    return out if bias is None else out + bias


def mlp(x: Tensor, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor], group: Group) -> Tensor:
    """Columns, GELU, rows: the hidden features stay where they are made, so each pass has one all-reduce."""
    return row_linear(F.gelu(column_linear(x, *up, group)), *down, group)


def keep_mask(like: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """1 where dropout keeps, 0 with probability `p`."""
    return torch.empty_like(like, memory_format=torch.contiguous_format).bernoulli_(1 - p, generator=generator)


def sequence_norm_dropout(
    x: Tensor, weight: Tensor, bias: Tensor, p: float, generator: torch.Generator, group: Group
) -> Tensor:
    """Layer norm, then dropout, of this rank's positions [B, T / n, d].

    `weight` and `bias` are whole, but see these positions only: their gradients are summed over ranks, as behind
    `enter_columns`. Ranks hold different positions, so `generator` must be another stream on each.
    """
    own = (enter_columns(weight, group), enter_columns(bias, group))
    normed = F.layer_norm(x, (x.shape[-1],), *own)
    return normed * keep_mask(normed, p, generator) / (1 - p) if p else normed


def sequence_mlp(x: Tensor, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor], group: Group) -> Tensor:
    """`mlp` between activations that are cut along the sequence: [B, T / n, d] -> [B, T / n, d].

    The bias of the last layer is added to this rank's positions only, so its gradient is summed over ranks.
    """
    hidden = F.gelu(F.linear(gather_sequence(x, group), *up))
    weight, bias = down
    return scatter_sequence(F.linear(hidden, weight), group) + enter_columns(bias, group)
