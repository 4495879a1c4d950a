"""Attention over ranks is attention in one process: values, gradients, communication, dropout."""

from __future__ import annotations

from typing import Any

import cp_ranks
import pytest

from mtb_core import run_ranks
from mtb_cp.cutting import causal_shares, cut, positions_of
from mtb_cp.ring import tiles

RANKS = (2, 4)


def on_ranks(main: Any, ranks: int) -> Any:
    outcome = run_ranks(main, nproc=ranks, device="cpu")
    assert outcome.exit_reason == "done", outcome.failure
    return outcome.value


@pytest.fixture(scope="module", params=RANKS)
def errors(request: pytest.FixtureRequest) -> dict[str, cp_ranks.Errors]:
    """Of all cases; one launch of ranks for all tests."""
    found: dict[str, cp_ranks.Errors] = on_ranks(cp_ranks.compare, request.param)
    return found


def test_values_and_gradients_are_those_of_one_process(errors: dict[str, cp_ranks.Errors]) -> None:
    """In fp64 to 1e-14 of the largest element, in bf16 to its rounding; gathered and ring, both cuts, also in tiles."""
    right = {name: found for name, found in errors.items() if name not in cp_ranks.MISTAKES}
    assert len(right) == 10
    for name, found in right.items():
        for quantity, error in found.items():
            assert error <= (3e-2 if "bfloat16" in name else 1e-14), (name, quantity)


@pytest.mark.parametrize("mistake", cp_ranks.MISTAKES)
def test_mistakes_show(mistake: str, errors: dict[str, cp_ranks.Errors]) -> None:
    """Gradients of keys and values that are not summed are wrong, and nothing else; wrong positions spoil the result."""
    wrong = {quantity for quantity, error in errors[mistake].items() if error > 1e-3}
    assert wrong == ({"k", "v"} if "gradients" in mistake else {"out", "q", "k", "v"})


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_communication_is_that_of_theory(ranks: int) -> None:
    """Calls, message bytes, bytes sent and held of one forward and backward; S is a rank's keys and values."""
    batch, heads, length, features = cp_ranks.SHAPE
    own = 2 * batch * heads * (length // ranks) * features * 4
    found = on_ranks(cp_ranks.count, ranks)
    gather, ring = found["gather"], found["ring"]
    assert gather["forward"] == ({"all_gather": 1}, {"all_gather": ranks * own})
    assert gather["backward"] == ({"reduce_scatter": 1}, {"reduce_scatter": ranks * own})
    once = ranks - 1
    assert ring["forward"] == ({"send": once, "recv": once}, {"send": once * own, "recv": once * own})
    assert ring["backward"] == ({"send": 2 * once, "recv": 2 * once}, {"send": 2 * once * own, "recv": 2 * once * own})
    assert (gather["sent"], ring["sent"]) == (2 * once * own, 3 * once * own)
    assert (gather["held"], ring["held"]) == (ranks * own, own)
    assert gather["saved"] - ring["saved"] >= gather["held"] - ring["held"], "saved for backward, as autograd has it"


def test_dropout() -> None:
    """Backward has the masks of forward; what stays is scaled so that means stay; ranks drop different weights."""
    for attention, found in on_ranks(cp_ranks.drop, 2).items():
        assert found["derivative"] == pytest.approx(found["differences"], rel=1e-6), attention
        assert found["mean"] == pytest.approx(1.0, abs=0.1), attention
        assert found["least_spread"] > 0.1, attention
        assert found["different"] == 2, attention


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_cuts(ranks: int, balance: str) -> None:
    """Ranks together have each position once; the tiles of all ranks cover each pair that is seen once, and no other."""
    cuts = cut(24, ranks, balance)
    assert sorted(p for parts in cuts for p in positions_of(parts)) == list(range(24))
    pairs = []
    for own in cuts:
        for other in cuts:
            mine, theirs = positions_of(own), positions_of(other)
            for tile in tiles(own, other):
                rows, keys = mine[tile.rows], theirs[tile.keys]
                hidden = len(keys) - len(rows) + 1 if tile.diagonal else len(keys)
                pairs += [(q, k) for i, q in enumerate(rows) for k in keys[: hidden + i]]
    assert sorted(pairs) == [(q, k) for q in range(24) for k in range(q + 1)]
    shares = causal_shares(cuts)
    assert sum(shares) == pytest.approx(1)
    if balance == "zigzag":
        assert max(shares) == pytest.approx(min(shares))
    elif ranks > 1:
        assert max(shares) > 1.3 / ranks
