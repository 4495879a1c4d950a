"""From the router's logits to each token's experts and their weights, and to the figures of the routing.

Everything here is per sample: capacity, balance and the figures never mix samples. So they do not depend on how the
global batch is spread over ranks and micro-batches, and no rank needs the counts of another one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtb_comm import capacity_per_expert, positions, slot_weights

#: Figures of a sample, the mean over the blocks, in this order. See `route`.
FIGURES = ("aux_loss", "z_loss", "load_imbalance", "dropped_share", "router_entropy")


class Routed(NamedTuple):
    """The routing of B samples of T tokens, each of which goes to k of E experts. A tuple, for torch.compile.

    Attributes:
        experts: int64 [B, T, k], the best one first.
        weights: fp32 [B, T, k], what the output of each of these experts counts; differentiable.
        placed: bool [B, T, k], False where the expert is full; None: all have a place.
        figures: fp32 [B, 5], see `FIGURES`; the first two are differentiable.
    """

    experts: Tensor
    weights: Tensor
    placed: Tensor | None
    figures: Tensor


def route(logits: Tensor, top_k: int, capacity_factor: float | None) -> Routed:
    """Route tokens by `logits`, fp32 [B, T, E].

    Of equal logits the expert with the lower number is preferred. With a capacity, a sample's tokens ask in the order
    of their positions, each for its best expert first; so no token depends on later ones, as a causal model needs.

    The figures of a sample, where f_e is the share of its T k choices that fell on expert e, whether placed or not,
    and P_e the mean over its tokens of the probability of e:

    - aux_loss: E sum_e f_e P_e, 1 for even routing; its gradient goes through P alone. Source: DeepSeek-V3
      (arXiv:2412.19437, equations 17 to 20), the balance of each sequence; Switch Transformers (arXiv:2101.03961,
      equations 4 to 6) have the same formula over a batch.
    - z_loss: the mean over tokens of logsumexp(logits)^2. Source: ST-MoE (arXiv:2202.08906, equation 5).
    - load_imbalance: the largest f_e over their mean, 1 for even routing, E if all choices fall on one expert.
    - dropped_share: the part of the choices that got no place.
    - router_entropy: the mean over tokens of the entropy of the probabilities, nats; ln E at most.
    """
    batch, length, n_experts = logits.shape
    log_odds = logits.log_softmax(dim=-1)
    odds = log_odds.exp()
    # A stable sort, because topk may take any of equal logits.
    ranking = logits.detach().sort(dim=-1, descending=True, stable=True).indices
    experts = ranking[..., :top_k].contiguous()
    weights = slot_weights(odds.flatten(0, 1), experts.flatten(0, 1)).view_as(experts)

    sample = torch.arange(batch, device=logits.device).view(-1, 1, 1)
    place, counts = positions((sample * n_experts + experts).flatten(), batch * n_experts)
    share = counts.view(batch, n_experts).to(odds.dtype) / (length * top_k)
    placed = None
    if capacity_factor is not None:
        placed = place.view_as(experts) < capacity_per_expert(capacity_factor, top_k, length, n_experts)
    dropped = logits.new_zeros(batch) if placed is None else 1 - placed.float().mean(dim=(1, 2))
    figures = (
        n_experts * (share * odds.mean(dim=1)).sum(dim=-1),
        logits.logsumexp(dim=-1).square().mean(dim=1),
        n_experts * share.amax(dim=-1),
        dropped,
        -(odds * log_odds).detach().sum(dim=-1).mean(dim=1),
    )
    return Routed(experts, weights, placed, torch.stack(figures, dim=-1))
