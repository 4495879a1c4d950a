"""Owner rank and capacity of each expert. Pure arithmetic, torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def experts_per_rank(experts: int, ranks: int) -> tuple[int, ...]:
    """Number of experts of each rank, as even as possible: the first ``experts % ranks`` have one more.

    Ranks beyond the number of experts own none; they still take part in every collective.
    """
    share, rest = divmod(experts, ranks)
    return tuple(share + (rank < rest) for rank in range(ranks))


def expert_owner_map(experts: int, ranks: int) -> tuple[int, ...]:
    """The owner of each expert. Owners are in order, so that tokens sorted by expert are sorted by rank too."""
    return tuple(rank for rank, count in enumerate(experts_per_rank(experts, ranks)) for _ in range(count))


def capacity_per_expert(factor: float, top_k: int, tokens: int, experts: int) -> int:
    """Slots of an expert: ``ceil(factor * top_k * tokens / experts)``, `tokens` being those of all ranks.

    Source: Lepikhin et al., "GShard" (arXiv:2006.16668), section 2.2, and Fedus et al., "Switch Transformers"
    (arXiv:2101.03961), equation 3; both leave the rounding open. The factor is taken as the decimal number it is
    written as: 1.1 times 10 slots are 11, not the 12 that binary rounding would make of it.
    """
    return math.ceil(Fraction(repr(factor)) * top_k * tokens / experts)


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers proportional to `weights` that sum to `total`, by largest remainders; ties go to the first.

    Where the weights sum to `total` and are whole, they come back as they are.
    """
    exact = [Fraction(w) for w in weights]
    shares = [w * total / sum(exact) for w in exact]
    out = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(out)), key=lambda i: out[i] - shares[i])
    for i in by_remainder[: total - sum(out)]:
        out[i] += 1
    return out
