"""The layer: gate, permute, exchange counts, dispatch, experts, combine, unpermute. `naive` is its readable twin."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor, nn

from .admission import Admission, admit, choose_tokens
from .exchange import Exchange
from .experts import Experts
from .gating import load_balancing_share, probabilities, slot_weights, z_loss_share
from .passage import Splits, through_experts
from .permutation import permute, sort_by_expert, unpermute
from .placement import capacity_per_expert, experts_per_rank
from .seeds import generator
from .settings import RouteSettings

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@attrs.frozen
class Traffic:
    """Traffic of one pass, as counted on this rank.

    Attributes:
        requested: [E], first requests of all ranks' slots before any capacity.
        per_expert: [E], slots of this rank that each expert takes.
        send: rows to each rank.
        receive: rows from each rank.
        tokens: of this rank.
        overflowed_slots: slots of this rank whose first expert was full.
        dropped_slots: those that got no place at all.
        dropped_tokens: tokens of this rank that no expert takes.
        capacity: slots of an expert over all ranks; None: as many as come.
    """

    requested: list[int]
    per_expert: list[int]
    send: list[int]
    receive: list[int]
    tokens: int
    overflowed_slots: int
    dropped_slots: int
    dropped_tokens: int
    capacity: int | None


@attrs.frozen
class _Routed:
    """Slots of this rank by token, before they are sorted; `through` [T] is what of each token passes unchanged."""

    token: Tensor
    expert: Tensor
    weight: Tensor
    requested: Tensor
    load_balancing: Tensor
    capacity: int | None
    through: Tensor | None = None
    admission: Admission | None = None


@attrs.frozen
class Passed:
    """The outcome of a pass: `output` [T, d] and this rank's shares of the two losses; `traffic` counts what it moved."""

    output: Tensor
    load_balancing: Tensor
    z_loss: Tensor
    _routed: _Routed
    _per_expert: list[int]
    _send: list[int]
    _receive: list[int]

    def traffic(self) -> Traffic:
        """Counted now rather than in the pass, whose time it would add to."""
        tokens, admission = self.output.shape[0], self._routed.admission
        return Traffic(
            requested=self._routed.requested.tolist(),
            per_expert=self._per_expert,
            send=self._send,
            receive=self._receive,
            tokens=tokens,
            overflowed_slots=0 if admission is None else int(admission.overflowed.sum()),
            dropped_slots=0 if admission is None else int((~admission.placed).sum()),
            dropped_tokens=tokens - int(self._routed.token.unique().shape[0]),
            capacity=self._routed.capacity,
        )


class MoELayer(nn.Module):
    """A mixture of experts that are spread over all ranks; the router is the same on each.

    Forward and backward are called by all ranks alike. Gradients of experts are whole where they are owned. Those of
    the router are this rank's share: their sum over ranks is the gradient.
    """

    def __init__(self, settings: RouteSettings, exchange: Exchange, device: str) -> None:
        super().__init__()
        self.settings = settings
        self.exchange = exchange
        dtype = TORCH_DTYPES[settings.dtype]
        # The router computes in fp32 at least, as ST-MoE and Switch found needed: it decides, rather than blends.
        wide = torch.promote_types(dtype, torch.float32)
        hidden = settings.hidden_size
        weight = torch.randn(hidden, settings.num_experts, generator=generator(settings.seed, "router"))
        self.router = nn.Parameter(weight.mul_(hidden**-0.5).to(wide))
        self.per_rank = experts_per_rank(settings.num_experts, exchange.ranks)
        self.experts = Experts(
            sum(self.per_rank[: exchange.rank]),
            self.per_rank[exchange.rank],
            seed=settings.seed,
            hidden=hidden,
            ffn=settings.ffn_size,
            dtype=dtype,
        )
        self.to(device)

    def forward(self, x: Tensor, preference: Tensor | None = None, *, total: int) -> Passed:
        """Tokens [T, d] through their experts.

        Args:
            x: T may differ from rank to rank, and be 0.
            preference: [T, E]: order in which tokens want experts, in place of the logits, and added to these, as if
                the router had learned it.
            total: tokens of all ranks.
        """
        exchange, lap = self.exchange, self.exchange.lap
        if torch.is_grad_enabled() and not x.requires_grad:
            # Every rank must come through the collectives of the backward pass, one without experts too.
            x = x.detach().requires_grad_()
        logits = x.to(self.router.dtype) @ self.router
        if preference is not None:
            logits = logits + preference
        routed = self._route(logits, logits if preference is None else preference, total)
        z_loss = z_loss_share(logits, total)
        lap("gate")

        slots = sort_by_expert(routed.token, routed.expert, routed.weight, self.settings.num_experts)
        rows = permute(x, slots)
        lap("permute")
        received = exchange.swap_counts(slots.per_expert, self.per_rank)
        # One copy to the host, which is all that it waits for the device.
        counts = torch.cat((slots.per_expert, received.sum(dim=1), received.sum(dim=0))).cpu()
        per_expert, receive, own = counts.split([slots.per_expert.shape[0], *received.shape])
        send = [int(part.sum()) for part in per_expert.split(self.per_rank)]
        lap("count_exchange")

        splits = Splits(send, receive.tolist(), own.tolist())
        rows = through_experts(rows, received, splits, exchange, self.experts)
        output = unpermute(rows, slots, x.shape[0])
        if routed.through is not None:
            output = output + routed.through[:, None] * x
        output = output.to(x.dtype)
        lap("unpermute")
        return Passed(output, routed.load_balancing, z_loss, routed, per_expert.tolist(), send, splits.receive)

    def _route(self, logits: Tensor, preference: Tensor, total: int) -> _Routed:
        settings = self.settings
        capacity = None
        if settings.capacity_factor is not None:
            capacity = capacity_per_expert(settings.capacity_factor, settings.top_k, total, settings.num_experts)
        gates = probabilities(logits, settings.gate)
        if settings.routing == "token":
            admission = admit(preference.detach(), settings.top_k, capacity, settings.overflow, self.exchange)
            return self._token_choice(gates, admission, capacity, total)
        assert capacity is not None
        return self._expert_choice(gates, min(capacity, total))

    def _token_choice(self, gates: Tensor, admission: Admission, capacity: int | None, total: int) -> _Routed:
        weights = slot_weights(gates, admission.experts)
        placed = admission.placed
        return _Routed(
            token=placed.nonzero()[:, 0],
            expert=admission.experts[placed],
            weight=weights[placed],
            requested=admission.requested,
            load_balancing=load_balancing_share(gates, admission.requested, total, self.settings.top_k),
            capacity=capacity,
            through=(weights * ~placed).sum(dim=1) if self.settings.overflow == "residual" else None,
            admission=admission,
        )

    def _expert_choice(self, gates: Tensor, capacity: int) -> _Routed:
        """Every expert has the same number of tokens, so there is no load to balance and nothing overflows."""
        token, expert = choose_tokens(gates, capacity, self.exchange)
        requested = torch.full((self.settings.num_experts,), capacity, device=gates.device)
        return _Routed(token, expert, gates[token, expert], requested, gates.new_zeros(()), capacity)
