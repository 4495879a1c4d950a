"""Owners, capacities and apportioned counts, by hand and as properties."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from mtb_comm.moe.placement import apportion, capacity_per_expert, expert_owner_map, experts_per_rank


@pytest.mark.parametrize(
    ("experts", "ranks", "owners"),
    [
        (8, 2, (0, 0, 0, 0, 1, 1, 1, 1)),
        (5, 3, (0, 0, 1, 1, 2)),
        (7, 3, (0, 0, 0, 1, 1, 2, 2)),
        (2, 4, (0, 1)),
        (1, 1, (0,)),
    ],
)
def test_owners(experts: int, ranks: int, owners: tuple[int, ...]):
    """Experts are dealt in blocks, the first ranks get the rest, and a rank may own none."""
    assert expert_owner_map(experts, ranks) == owners
    assert experts_per_rank(experts, ranks) == tuple(owners.count(rank) for rank in range(ranks))


@pytest.mark.parametrize(
    ("factor", "top_k", "tokens", "experts", "capacity"),
    [
        (1.25, 1, 256, 8, 40),
        (1.0, 2, 100, 8, 25),
        (1.0, 1, 10, 3, 4),
        (1.1, 1, 10, 1, 11),  # 1.1 * 10 is 11.000000000000002 in binary
        (0.1, 3, 10, 1, 3),
        (1e-9, 1, 10, 4, 1),
    ],
)
def test_capacity(factor: float, top_k: int, tokens: int, experts: int, capacity: int):
    """ceil(factor * k * T / E), without errors of binary rounding; never below 1."""
    assert capacity_per_expert(factor, top_k, tokens, experts) == capacity


def test_apportion_is_proportional():
    """Sums match, no number is a whole one away from its share, and numbers that fit already stay."""
    assert apportion([3, 0, 5], 8) == [3, 0, 5]
    assert apportion([1, 1, 1], 4) == [2, 1, 1]
    draw = random.Random(0)
    for _ in range(200):
        weights = [draw.choice([0, draw.random(), draw.randrange(1000)]) for _ in range(draw.randint(1, 9))] + [1]
        total = draw.randrange(1, 500)
        found = apportion(weights, total)
        exact = [Fraction(w) * total / sum(map(Fraction, weights)) for w in weights]
        assert sum(found) == total
        assert all(abs(a - b) < 1 for a, b in zip(found, exact, strict=True))
