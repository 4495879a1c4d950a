"""Ring attention: keys and values pass from rank to rank, and each rank adds up what its queries see of them.

Softmax is computed online (Milakov and Gimelshein, 2018): with the logarithm of the sum of exponentials beside it, a
result over some keys can be joined with that over others, exactly. Backward lets keys and values pass once more (Liu,
Zaharia and Abbeel, 2023). No rank ever holds the keys of all positions, nor more than `TILE` rows of scores of one part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtb_cp.sharing import SharedSequence, rows_of

#: Rows of scores that are computed at once.
TILE = 512


@attrs.frozen
class Tile:
    """Some queries of this rank, and the keys of one part of another that they see.

    Attributes:
        rows: among this rank's positions.
        keys: among the other's.
        diagonal: the last row sees all keys, and each row before it one less; otherwise all rows see all.
    """

    rows: slice
    keys: slice
    diagonal: bool


def tiles(own: Sequence[range], other: Sequence[range]) -> Iterator[Tile]:
    """All that the positions `own` see of the positions `other`; both in parts of one length."""
    for queries, rows in zip(own, rows_of(own), strict=True):
        for keys, columns in zip(other, rows_of(other), strict=True):
            if keys.start > queries.start:
                continue  # they all come later
            for first in range(0, len(queries), TILE):
                last = min(first + TILE, len(queries))
                same = keys == queries
                end = columns.start + last if same else columns.stop
                yield Tile(slice(rows.start + first, rows.start + last), slice(columns.start, end), same)


class _Ring(torch.autograd.Function):
    """Queries [B, heads, positions, features] and this rank's keys and values, stacked, to the result of attention.

    Sums are in fp32, or in fp64 where that is given; what travels has the dtype of its inputs.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, dropout: float, seed: int, shared: SharedSequence) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        masks = _Dropout(dropout, seed, q.device)
        queries = _scaled(q, wide)
        # Heads of a position lie side by side, as torch's kernels have it: a model that joins them needs no copy.
        out = torch.zeros_like(q.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format).transpose(1, 2)
        lse = torch.full((*q.shape[:-1], 1), float("-inf"), dtype=wide, device=q.device)
        for source, block in shared.rotate(kv):
            keys, values = block.to(wide).unbind()
            for tile in tiles(shared.own, shared.cuts[source]):
                scores = _scores(queries, keys, tile)
                added = scores.logsumexp(-1, keepdim=True)
                weights = masks.apply(scores.sub_(added).exp_())
                total = torch.logaddexp(lse[..., tile.rows, :], added)
                out[..., tile.rows, :] *= (lse[..., tile.rows, :] - total).exp()
                out[..., tile.rows, :] += (weights @ values[..., tile.keys, :]) * (added - total).exp()
                lse[..., tile.rows, :] = total
        result = out.to(q.dtype)
        ctx.save_for_backward(q, kv, result, lse)
        ctx.dropout, ctx.seed, ctx.shared = dropout, seed, shared
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q, kv, result, lse = ctx.saved_tensors
        shared: SharedSequence = ctx.shared
        wide = lse.dtype
        masks = _Dropout(ctx.dropout, ctx.seed, q.device)
        queries, upper = _scaled(q, wide), grads[0].to(wide)
        inner = (upper * result).sum(-1, keepdim=True)
        dq = torch.zeros_like(queries)
        own = passed = None
        for source, block in shared.rotate(kv):
            keys, values = block.to(wide).unbind()
            dkv = torch.zeros(block.shape, dtype=wide, device=q.device)
            for tile in tiles(shared.own, shared.cuts[source]):
                rows, columns = tile.rows, tile.keys
                weights = _scores(queries, keys, tile).sub_(lse[..., rows, :]).exp_()
                kept = masks.draw(weights)
                dweights = upper[..., rows, :] @ values[..., columns, :].mT
                dropped = weights
                if kept is not None:
                    dropped = weights * kept
                    dweights *= kept
                dkv[1][..., columns, :] += dropped.mT @ upper[..., rows, :]
                dscores = dweights.sub_(inner[..., rows, :]).mul_(weights)
                dq[..., rows, :] += dscores @ keys[..., columns, :]
                dkv[0][..., columns, :] += dscores.mT @ queries[..., rows, :]
            if own is None:
                own = dkv  # the sum over the others begins at the next rank and comes home from the last
                continue
            if passed is not None:
                dkv += passed.wait()
            passed = shared.shift(dkv.to(kv.dtype))
        assert own is not None
        if passed is not None:
            own += passed.wait()
        return _scaled(dq, wide).to(q.dtype), own.to(kv.dtype), None, None, None


class _Dropout:
    """Masks of attention weights, drawn anew in the same order wherever an object is made from the same seed."""

    def __init__(self, p: float, seed: int, device: torch.device) -> None:
        self._p = p
        self._generator = torch.Generator(device).manual_seed(seed) if p else None

    def draw(self, weights: Tensor) -> Tensor | None:
        """The factor of each weight: 0, or 1 / (1 - p); None: all stay."""
        if self._generator is None:
            return None
        return torch.empty_like(weights).bernoulli_(1 - self._p, generator=self._generator).div_(1 - self._p)

    def apply(self, weights: Tensor) -> Tensor:
        """`weights` after dropout."""
        kept = self.draw(weights)
        return weights if kept is None else weights.mul_(kept)


@attrs.frozen(eq=False)
class RingAttention:
    """Causal attention of this rank's positions of `shared` to those of all ranks. Called by all of them.

    Keys and values make a round in forward, and another in backward, followed by their gradients. Dropout follows from
    one number that the rank draws from its own stream.
    """

    shared: SharedSequence

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Of queries, keys and values of this rank's positions, each [batch, heads, positions, features]."""
        kv = torch.stack((k, v))
        seed = int(torch.randint(2**62, (), dtype=torch.int64)) if dropout else 0
        with torch.autocast(q.device.type, enabled=False):  # sums are wider than what autocast would make of them
            out: Tensor = _Ring.apply(q, kv, dropout, seed, self.shared)  # type: ignore[no-untyped-call]
        if out.requires_grad:
            self.shared.traffic.held = kv.numel() * kv.element_size()
        return out


def _scaled(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) / math.sqrt(x.shape[-1])


def _scores(queries: Tensor, keys: Tensor, tile: Tile) -> Tensor:
    """Scaled products of a tile's queries and keys, minus infinity where a key comes later: [B, heads, rows, keys]."""
    scores: Tensor = queries[..., tile.rows, :] @ keys[..., tile.keys, :].mT
    if tile.diagonal:
        rows, columns = scores.shape[-2:]
        later = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(columns - rows + 1)
        scores.masked_fill_(later, float("-inf"))
    return scores
