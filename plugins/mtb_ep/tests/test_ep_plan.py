"""Strategy `ep` says before any rank starts what cannot be, and what would be valid."""

from __future__ import annotations

from typing import Any

import pytest

from mtb_core import ConfigError, Plan, TrainConfig, World
from mtb_ep.plugin import EPOptions, plan


def planned(ranks: int, ep: int | None = None, model: str = "moe", **model_opt: Any) -> Plan:
    return plan(EPOptions(ep), TrainConfig(model=model, model_opt=model_opt), World(ranks, ranks))


def test_every_rank_has_its_own_samples() -> None:
    """On 8 ranks with ep=2 there are 8 sample streams; neighbours share experts."""
    found = planned(8, 2)
    assert found.layout.axes == (("dp", 4), ("ep", 2))
    assert [found.layout.data_rank(rank) for rank in range(8)] == list(range(8))
    assert all(found.layout.counts_loss(rank) and found.layout.counts_samples(rank) for rank in range(8))
    assert found.options == EPOptions(2)
    assert found.exact
    assert found.sharded
    assert planned(4, 1).sharded is False


def test_without_options_all_ranks_share_the_experts() -> None:
    """The degree is recorded, so that a run can be repeated."""
    assert planned(4).options == EPOptions(4)


@pytest.mark.parametrize(
    ("ranks", "ep", "model", "options", "text"),
    [
        (4, 3, "moe", {}, "ep=3, which does not divide the 4 ranks; valid: 1, 2, 4"),
        (3, None, "moe", {"experts": "8"}, "8 experts cannot be shared by ep=3 ranks; valid: 1, 2, 4, 8"),
        (2, None, "gpt", {}, "--model gpt has none; use --model moe"),
        (2, None, "moe", {"experts": "2", "top_k": "3"}, "top_k=3, but only experts=2"),
        (2, None, "moe", {"expert": "2"}, "Did you mean 'experts'"),
    ],
)
def test_refusals(ranks: int, ep: int | None, model: str, options: dict[str, str], text: str) -> None:
    """The message names the value and what would be valid."""
    with pytest.raises(ConfigError, match=text):
        planned(ranks, ep, model, **options)
