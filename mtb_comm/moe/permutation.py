"""Moving rows between the order of tokens and the order of experts, all at once; `naive` does the same by loops."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Slots:
    """The S slots of this rank that have a place, sorted by expert and, within one, by token.

    Attributes:
        token: [S], index of the token.
        weight: [S], what the expert's output counts in the token's output; differentiable.
        per_expert: [E], how many slots each expert has.
    """

    token: Tensor
    weight: Tensor
    per_expert: Tensor


def sort_by_expert(token: Tensor, expert: Tensor, weight: Tensor, experts: int) -> Slots:
    """Slots given by token, in the order in which they are sent: owners of experts are in order, so by rank too."""
    order = expert.argsort(stable=True)
    return Slots(token[order], weight[order], torch.bincount(expert, minlength=experts))


def permute(x: Tensor, slots: Slots) -> Tensor:
    """Rows [S, d] to send, of tokens [T, d]; a token stands there once for each of its slots."""
    return x.index_select(0, slots.token)


def unpermute(rows: Tensor, slots: Slots, tokens: int) -> Tensor:
    """[tokens, d]: each token's weighted sum of its slots' rows [S, d], in the weights' dtype."""
    weighted = rows * slots.weight[:, None]
    return weighted.new_zeros(tokens, rows.shape[1]).index_add(0, slots.token, weighted)


def by_own_expert(received: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Permutation that sorts received rows, which come by source rank and then by expert, by expert alone.

    `received` [ranks, own experts] are their numbers, `rows` the sum of these. Returns the index that sorts them, and
    the one that undoes it.
    """
    own = received.shape[1]
    experts = torch.arange(own, device=received.device).repeat(received.shape[0])
    # Told the size of its output, it need not wait for the device to know it.
    labels = experts.repeat_interleave(received.flatten(), output_size=rows)
    order = labels.argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return order, back
