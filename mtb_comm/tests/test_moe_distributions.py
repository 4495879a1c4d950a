"""Preferences give experts the shares that were asked for."""

from __future__ import annotations

import pytest
import torch

from mtb_comm.moe.distributions import preference
from mtb_comm.moe.placement import apportion
from mtb_comm.moe.settings import RouteSettings


def first_choices(settings: RouteSettings, ranks: int = 2) -> torch.Tensor:
    """Number of tokens of all ranks whose first choice is each expert."""
    wanted = torch.cat([preference(settings, rank, ranks) for rank in range(ranks)])
    return torch.bincount(wanted.argmax(dim=1), minlength=settings.num_experts)


@pytest.mark.parametrize(("name", "s"), [("uniform", 0.0), ("zipf", 0.0), ("zipf", 1.0), ("zipf", 2.0)])
def test_drawn_shares(name: str, s: float):
    """Over many tokens first choices follow the law within five standard deviations of a draw."""
    settings = RouteSettings(distribution=name, zipf_s=s, tokens_per_rank=10_000, num_experts=8)
    law = torch.arange(1, 9, dtype=torch.float64) ** -s
    law /= law.sum()
    expected, n = law * 20_000, 20_000
    deviation = (n * law * (1 - law)).sqrt()
    assert ((first_choices(settings) - expected).abs() < 5 * deviation).all()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_hot_expert(share: float):
    """The share of tokens that want expert 0 first is what was asked for, above the even part of the others."""
    settings = RouteSettings(distribution="hot", hot_share=share, tokens_per_rank=5_000, num_experts=5)
    found = first_choices(settings)[0].item() / 10_000
    assert found == pytest.approx(share + (1 - share) / 5, abs=0.03)
    if share == 1.0:
        assert found == 1


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_counts_are_exact(top_k: int):
    """Every expert's slots are exactly the apportioned number, and no token asks for one expert twice."""
    weights = (5.0, 0.0, 1.0, 4.0, 3.0, 2.0)
    settings = RouteSettings(
        distribution="counts", counts=weights, num_experts=6, top_k=top_k, tokens_per_rank=37, hidden_size=4
    )
    wanted = torch.cat([preference(settings, rank, 3) for rank in range(3)])
    experts = wanted.topk(top_k, dim=1).indices
    assert torch.bincount(experts.flatten(), minlength=6).tolist() == apportion(weights, 3 * 37 * top_k)


def test_ranks_and_seeds_differ():
    """Every rank has its own tokens' preferences, the same again for the same seed."""
    settings = RouteSettings(tokens_per_rank=8)
    assert torch.equal(preference(settings, 1, 2), preference(settings, 1, 4))
    assert not torch.equal(preference(settings, 0, 2), preference(settings, 1, 2))
    assert not torch.equal(preference(settings, 0, 2), preference(RouteSettings(tokens_per_rank=8, seed=1), 0, 2))
