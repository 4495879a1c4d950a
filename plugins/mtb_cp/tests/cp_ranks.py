"""For tests of attention over ranks: what every rank computes, compared with one process that has all positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor

from mtb_core import CountCollectives, RankContext, gather_objects
from mtb_cp import ring
from mtb_cp.cutting import cut, positions_of
from mtb_cp.gathered import GatheredAttention
from mtb_cp.ring import RingAttention
from mtb_cp.sharing import Passing, SharedSequence

LENGTH, SHAPE = 24, (2, 3, 24, 5)
ATTENTIONS = {"gather": GatheredAttention, "ring": RingAttention}
Errors = dict[str, float]


class NotSummed(SharedSequence):
    """A mistake: each rank keeps the gradient that it finds itself."""

    def scatter_sum(self, whole: Tensor) -> Tensor:
        return whole[..., positions_of(self.own), :].contiguous()


class NotBroughtHome(SharedSequence):
    """A mistake: gradients of keys and values are lost on their way round the ring."""

    def shift(self, own: Tensor) -> Passing:
        return Passing(own, torch.zeros_like(own), ())

    def rotate(self, own: Tensor) -> Any:
        return SharedSequence(self.group, self.cuts).rotate(own)


def _other_cut(context: RankContext, cuts: Any) -> SharedSequence:
    """A mistake: ranks take their positions for those of the other balance."""
    other = "contiguous" if len(cuts[0]) == 2 else "zigzag"
    return SharedSequence(_group(context), cut(LENGTH, len(cuts), other))


def _group(context: RankContext) -> Any:
    assert context.mesh is not None
    return context.mesh.get_group()


#: By name: (attention, balance, what makes the shared sequence).
MISTAKES: dict[str, tuple[str, str, Callable[[RankContext, Any], SharedSequence]]] = {
    "gather: gradients not summed": ("gather", "zigzag", lambda c, cuts: NotSummed(_group(c), cuts)),
    "ring: gradients not brought home": ("ring", "zigzag", lambda c, cuts: NotBroughtHome(_group(c), cuts)),
    "gather: other positions": ("gather", "zigzag", _other_cut),
    "ring: other positions": ("ring", "contiguous", _other_cut),
}


def compare(_payload: None, context: RankContext, _worker: Any) -> dict[str, Errors]:
    """By case, the largest difference of result and gradients over all ranks, in units of the largest element."""
    found: dict[str, Errors] = {}
    for attention in ATTENTIONS:
        for balance in ("zigzag", "contiguous"):
            for dtype in (torch.float64, torch.bfloat16):
                name = f"{attention} {balance} {str(dtype).removeprefix('torch.')}"
                found[name] = _errors(context, attention, balance, dtype)
    for name, (attention, balance, make) in MISTAKES.items():
        found[name] = _errors(context, attention, balance, torch.float64, make)
    ring.TILE = 2
    for balance in ("zigzag", "contiguous"):
        found[f"tiles {balance}"] = _errors(context, "ring", balance, torch.float64)
    return found


def _errors(
    context: RankContext,
    attention: str,
    balance: str,
    dtype: torch.dtype,
    make: Callable[[RankContext, Any], SharedSequence] | None = None,
) -> Errors:
    cuts = cut(LENGTH, context.world_size, balance)
    mine = positions_of(cuts[context.rank])
    shared = SharedSequence(_group(context), cuts) if make is None else make(context, cuts)
    whole = [_numbers(i).requires_grad_() for i in range(3)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected.backward(_numbers(3))
    own = [t.detach()[..., mine, :].to(dtype).requires_grad_() for t in whole]
    seen = ATTENTIONS[attention](shared)(*own, 0.0)
    seen.backward(_numbers(3)[..., mine, :].to(dtype))
    pairs = {"out": (seen, expected), **{n: (o.grad, w.grad) for n, o, w in zip("qkv", own, whole, strict=True)}}
    errors = {name: _apart(a, b[..., mine, :], b) for name, (a, b) in pairs.items()}
    ranks = gather_objects(context, errors)
    return {name: max(rank[name] for rank in ranks) for name in errors}


def _apart(seen: Tensor, expected: Tensor, whole: Tensor) -> float:
    return float((seen.detach().double() - expected.detach()).abs().max() / whole.detach().abs().max())


@functools.cache
def _fixed(seed: int) -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _numbers(seed: int) -> Tensor:
    return _fixed(seed).clone()


def count(_payload: None, context: RankContext, _worker: Any) -> dict[str, dict[str, Any]]:
    """By attention, what one forward and backward communicates and holds, on rank 0."""
    found = {}
    for attention, kind in ATTENTIONS.items():
        cuts = cut(LENGTH, context.world_size, "zigzag")
        shared = SharedSequence(_group(context), cuts)
        own = [_numbers(i)[..., positions_of(cuts[context.rank]), :].float().requires_grad_() for i in range(3)]
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with CountCollectives() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = kind(shared)(*own, 0.0)
        with CountCollectives() as backward:
            out.sum().backward()
        found[attention] = {
            "forward": (forward.calls, forward.message_bytes),
            "backward": (backward.calls, backward.message_bytes),
            "sent": shared.traffic.sent,
            "held": shared.traffic.held,
            "saved": sum(saved.values()),
        }
    return found


def drop(_payload: None, context: RankContext, _worker: Any) -> dict[str, dict[str, float]]:
    """Attention with half of its weights dropped: the mean over values that are all one, and a derivative."""
    found = {}
    for attention, kind in ATTENTIONS.items():
        cuts = cut(LENGTH, context.world_size, "zigzag")
        mine = positions_of(cuts[context.rank])
        attend = kind(SharedSequence(_group(context), cuts))

        def loss(tensors: list[Tensor], attend: Any = attend, mine: list[int] = mine) -> Tensor:
            torch.manual_seed(context.rank)  # its own stream, and the same masks each time
            out: Tensor = attend(*tensors, 0.5)
            return (out * _numbers(3)[..., mine, :]).sum()

        own = [_numbers(i)[..., mine, :].requires_grad_() for i in range(3)]
        ways = [_numbers(4 + i)[..., mine, :] for i in range(3)]
        loss(own).backward()
        slope = sum(float((t.grad * way).sum()) for t, way in zip(own, ways, strict=True) if t.grad is not None)
        with torch.no_grad():
            ahead, back = (float(loss([t + s * w for t, w in zip(own, ways, strict=True)])) for s in (1e-5, -1e-5))
            ones = attend(*own[:2], torch.ones_like(own[2]), 0.5)
        ranks = gather_objects(context, (slope, (ahead - back) / 2e-5, float(ones.mean()), float(ones.std())))
        found[attention] = {
            "derivative": sum(r[0] for r in ranks),
            "differences": sum(r[1] for r in ranks),
            "mean": sum(r[2] for r in ranks) / len(ranks),
            "least_spread": min(r[3] for r in ranks),
            "different": len({r[2] for r in ranks}),
        }
    return found
