"""Admission: from the experts that tokens want to the slots that they get, equal on any number of ranks.

An expert's capacity is over the tokens of all ranks. Its queue has the first choices of all tokens, then all second
choices, and so on (as in GShard, arXiv:2006.16668, algorithm 1); within a choice tokens stand in global order, which is
by rank and then by position. So a token's experts do not depend on the number of ranks.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from .exchange import Exchange


@attrs.frozen
class Admission:
    """The outcome for this rank's T tokens.

    Attributes:
        experts: [T, k]: the expert of each slot; where it got no place, the one it asked for first.
        placed: [T, k]: whether the slot got a place.
        requested: [E]: slots of all ranks that asked for each expert first, whatever its capacity.
        overflowed: [T, k]: slots whose first expert was full.
    """

    experts: Tensor
    placed: Tensor
    requested: Tensor
    overflowed: Tensor


def admit(preference: Tensor, top_k: int, capacity: int | None, overflow: str, exchange: Exchange) -> Admission:
    """Let every token claim its `top_k` best experts; called by all ranks.

    Args:
        preference: [T, E], the higher the better; of equal ones the expert with the lower number is preferred.
        capacity: slots that an expert takes over all ranks; None: as many as come.
        overflow: with ``"next"`` a slot that finds its expert full asks, in rounds, the token's next-best experts
            that it did not ask yet.
    """
    tokens, n_experts = preference.shape
    ranking = preference.sort(dim=1, descending=True, stable=True).indices
    experts = ranking[:, :top_k].contiguous()
    room = torch.full((n_experts,), tokens if capacity is None else capacity, device=preference.device)
    choice = torch.arange(top_k, device=preference.device).expand(tokens, top_k)
    queue = _Queue(n_experts, top_k, exchange)
    accepted, requested = queue.ask(choice.flatten(), experts.flatten(), None if capacity is None else room)
    placed = accepted.view(tokens, top_k)
    overflowed = ~placed
    if capacity is not None and overflow == "next":
        experts, placed = _next_best(ranking, experts, placed, room, queue)
    return Admission(experts, placed, requested, overflowed)


def choose_tokens(scores: Tensor, capacity: int, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Every expert takes its `capacity` best tokens of all ranks: this rank's (token, expert) pairs, by token.

    Of equal scores the earlier token is taken. Source: Zhou et al., "Mixture-of-Experts with Expert Choice Routing"
    (arXiv:2202.09368), section 3.2.
    """
    everyone, first = exchange.scores(scores)
    best = everyone.sort(dim=0, descending=True, stable=True).indices[:capacity]
    chosen = torch.zeros_like(everyone, dtype=torch.bool)
    chosen.scatter_(0, best, True)
    pairs = chosen[first : first + scores.shape[0]].nonzero()
    return pairs[:, 0], pairs[:, 1]


class _Queue:
    """The queues before all experts."""

    def __init__(self, experts: int, top_k: int, exchange: Exchange) -> None:
        self._experts, self._top_k, self._exchange = experts, top_k, exchange

    def ask(self, choice: Tensor, expert: Tensor, room: Tensor | None) -> tuple[Tensor, Tensor]:
        """Slots, in token order, ask for a place; `room` [E] is lowered by those that get one.

        Returns:
            which of them got one, and how many slots of all ranks asked for each expert.
        """
        keys = choice * self._experts + expert
        place, mine = positions(keys, self._top_k * self._experts)
        everyone = self._exchange.gather(mine)
        asked = everyone.sum(dim=0).view(self._top_k, self._experts)
        if room is None:
            return torch.ones_like(keys, dtype=torch.bool), asked.sum(dim=0)
        earlier_ranks = everyone[: self._exchange.rank].sum(dim=0)
        earlier_choices = (asked.cumsum(dim=0) - asked).flatten()
        accepted = place + (earlier_ranks + earlier_choices)[keys] < room[expert]
        total = asked.sum(dim=0)
        room -= torch.minimum(room, total)
        return accepted, total


def _next_best(ranking: Tensor, experts: Tensor, placed: Tensor, room: Tensor, queue: _Queue) -> tuple[Tensor, Tensor]:
    """Rounds in which slots without a place ask on; all ranks see the same queues, so they end after the same round."""
    n_experts, top_k = ranking.shape[1], experts.shape[1]
    experts, placed = experts.clone(), placed.clone()
    asked_so_far = torch.full((ranking.shape[0], 1), top_k, device=ranking.device)
    while True:
        homeless = ~placed
        position = asked_so_far + homeless.cumsum(dim=1) - 1  # in the token's ranking; its slots take turns
        asking = homeless & (position < n_experts)
        token, choice = asking.nonzero(as_tuple=True)
        wanted = ranking[token, position[token, choice]]
        accepted, total = queue.ask(choice, wanted, room)
        if not total.any():
            return experts, placed
        asked_so_far += homeless.sum(dim=1, keepdim=True)
        experts[token[accepted], choice[accepted]] = wanted[accepted]
        placed[token[accepted], choice[accepted]] = True


def positions(keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """For keys [n] in ``range(size)``: how many equal ones stand before each (int64 [n]), and of each key the number."""
    counts = torch.bincount(keys, minlength=size)
    order = keys.argsort(stable=True)
    starts = counts.cumsum(dim=0) - counts
    place = torch.empty_like(keys)
    place[order] = torch.arange(keys.shape[0], device=keys.device) - starts[keys[order]]
    return place, counts
