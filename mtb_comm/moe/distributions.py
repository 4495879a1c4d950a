"""Distributions of tokens over experts: preferences like those of a router that has learned them.

For ``uniform`` and ``zipf`` each token's experts are drawn one after the other without replacement, expert e with the
probability p_e among those left (by Gumbel's trick: Kool et al., arXiv:1903.06059). For ``hot`` the first choice of a
share of the tokens is expert 0 and all else is uniform. For ``counts`` the experts get what the file says. For
``learned`` the router's own logits decide, and there is nothing here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .placement import apportion
from .seeds import generator
from .settings import RouteSettings


def preference(settings: RouteSettings, rank: int, ranks: int) -> Tensor | None:
    """[T, E] (fp32, CPU) for the tokens of `rank`; None: the logits decide. Depends on the seed and the rank alone."""
    if settings.distribution == "learned":
        return None
    if settings.distribution == "counts":
        tokens = settings.tokens_per_rank
        return _counted(settings, tokens * ranks)[rank * tokens : (rank + 1) * tokens]
    random = generator(settings.seed, "preference", rank)
    shape = (settings.tokens_per_rank, settings.num_experts)
    out = _gumbel(shape, random)
    if settings.distribution == "zipf":
        out -= settings.zipf_s * torch.arange(1, settings.num_experts + 1).log()
    if settings.distribution == "hot":
        hot = torch.rand(settings.tokens_per_rank, generator=random) < settings.hot_share
        out[hot, 0] = out[hot].amax(dim=1) + 1
    return out


def _gumbel(shape: tuple[int, int], random: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=random, dtype=torch.float64).clamp_min(1e-300)
    return -(-uniform.log()).clamp_min(1e-300).log().float()


def _counted(settings: RouteSettings, tokens: int) -> Tensor:
    """Preferences of all tokens under which the experts' numbers of slots are exactly the apportioned ones.

    Slots, sorted by expert, are dealt to the tokens like cards, round after round: an expert that has at most as many
    slots as there are tokens meets none twice.
    """
    assert settings.counts is not None
    top_k, experts = settings.top_k, settings.num_experts
    counts = torch.tensor(apportion(settings.counts, top_k * tokens))
    random = generator(settings.seed, "counts")
    dealt = torch.arange(experts).repeat_interleave(counts).view(top_k, tokens).T
    dealt = dealt[torch.randperm(tokens, generator=random)]
    out = _gumbel((tokens, experts), random)
    above = out.amax(dim=1, keepdim=True)
    first_to_last = torch.rand(dealt.shape, generator=random)  # which of a token's experts is its first choice
    return out.scatter(1, dealt, above + 1 + first_to_last)
