"""Attention by gathered keys and values: every rank has those of all positions, and queries of its own."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor

from mtb_cp.sharing import SharedSequence, rows_of


class _Gather(torch.autograd.Function):
    """Every rank uses all positions, so the gradient of this rank's positions is a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shared: SharedSequence) -> Tensor:
        ctx.shared = shared
        return shared.gather(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.shared.scatter_sum(grads[0]), None


@attrs.frozen(eq=False)
class GatheredAttention:
    """Causal attention of this rank's positions of `shared` to those of all ranks. Called by all of them.

    An all-gather in forward and a reduce-scatter in backward. Each part of the positions sees the keys up to its own
    end and no others, so later ones cost nothing. Dropout draws from the rank's own stream.
    """

    shared: SharedSequence
    _masks: dict[tuple[range, torch.dtype, torch.device], Tensor] = attrs.field(factory=dict, init=False)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Of queries, keys and values of this rank's positions, each [batch, heads, positions, features]."""
        whole: Tensor = _Gather.apply(torch.stack((k, v)), self.shared)  # type: ignore[no-untyped-call]
        if whole.requires_grad:
            self.shared.traffic.held = whole.numel() * whole.element_size()
        keys, values = whole.unbind()
        out = []
        for part, rows in zip(self.shared.own, rows_of(self.shared.own), strict=True):
            seen = slice(0, part.stop)
            mask = self._mask(part, q) if part.start else None
            out.append(
                F.scaled_dot_product_attention(
                    q[..., rows, :],
                    keys[..., seen, :],
                    values[..., seen, :],
                    attn_mask=mask,
                    dropout_p=dropout,
                    is_causal=mask is None,
                )
            )
        # Heads of a position lie side by side, as torch's kernels have it: a model that joins them needs no copy.
        return torch.cat([part.transpose(1, 2) for part in out], dim=1).transpose(1, 2)

    def _mask(self, part: range, q: Tensor) -> Tensor:
        """0 where a position of `part` sees one up to the last of `part`, else minus infinity: [part, positions].

        All layers use one, for each keeps its mask for backward.
        """
        key = (part, q.dtype, q.device)
        if key not in self._masks:
            hidden = torch.ones(len(part), part.stop, dtype=torch.bool, device=q.device).triu(part.start + 1)
            zeros = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
            self._masks[key] = zeros.masked_fill_(hidden, float("-inf"))
        return self._masks[key]
