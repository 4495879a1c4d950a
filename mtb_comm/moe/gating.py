"""From logits to gates, and the two losses that keep a router in order. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

#: Sums of gates count as this much at least, so that a token whose gates all vanish gets zeros, and gradients stay
#: finite: the smallest fp32 would not do, as one over it overflows. (DeepSeek-V3's code adds the same number.)
SMALLEST_SUM = 1e-20


def probabilities(logits: Tensor, gate: str) -> Tensor:
    """Gate values [T, E] of logits [T, E]: softmax over the experts, or each expert's own sigmoid."""
    return torch.softmax(logits, dim=-1) if gate == "softmax" else torch.sigmoid(logits)


def slot_weights(gates: Tensor, experts: Tensor) -> Tensor:
    """Weights of each token's experts in its output: [T, k] of gates [T, E] and chosen experts [T, k].

    With k = 1 the gate itself, as in Switch Transformers (arXiv:2101.03961, equation 2): a constant would leave the
    router without a gradient. With k > 1 gates are divided by their sum over the token's experts, as in GShard
    (arXiv:2006.16668, algorithm 1), Mixtral, and for sigmoids DeepSeek-V3 (arXiv:2412.19437, equation 13).
    """
    chosen = gates.gather(1, experts)
    if experts.shape[1] == 1:
        return chosen
    return chosen / chosen.sum(dim=1, keepdim=True).clamp_min(SMALLEST_SUM)


def load_balancing_share(gates: Tensor, requested: Tensor, tokens: int, top_k: int) -> Tensor:
    """This rank's share of the load-balancing loss; over all ranks the shares sum to ``E * sum_i(f_i * P_i)``.

    f_i is the fraction of all slots that asked for expert i before any capacity: `requested` [E], of all ranks, over
    top_k * tokens. P_i is the mean over all `tokens` of the probability of expert i; sigmoid gates are divided by their
    sum first. The loss is 1 if both are even. The gradient flows through P alone. Because f is a constant, the shares
    are differentiated without communication.

    Source: Fedus et al., "Switch Transformers" (arXiv:2101.03961), equations 4 to 6, there for k = 1 and scaled by
    its weight; the division of sigmoids is that of DeepSeek-V3 (arXiv:2412.19437, equation 18).
    """
    experts = gates.shape[1]
    normalised = gates / gates.sum(dim=1, keepdim=True).clamp_min(SMALLEST_SUM)
    fraction = requested.to(gates.dtype) / (top_k * tokens)
    return experts * (fraction * (normalised.sum(dim=0) / tokens)).sum()


def z_loss_share(logits: Tensor, tokens: int) -> Tensor:
    """This rank's share of the router z-loss; over all ranks the shares sum to ``mean_t(logsumexp(logits_t) ** 2)``.

    Source: Zoph et al., "ST-MoE" (arXiv:2202.08906), equation 5.
    """
    return torch.logsumexp(logits, dim=-1).square().sum() / tokens
