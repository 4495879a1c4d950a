"""The fused permutation against loops."""

from __future__ import annotations

import pytest
import torch

from mtb_comm.moe import naive
from mtb_comm.moe.permutation import by_own_expert, permute, sort_by_expert, unpermute


def slots_of(seed: int, tokens: int = 17, experts: int = 6):
    """Random slots, by token; expert 2 has none."""
    random = torch.Generator().manual_seed(seed)
    taken = torch.rand(tokens, experts, generator=random) < 0.4
    taken[:, 2] = False
    token, expert = taken.nonzero(as_tuple=True)
    weight = torch.rand(len(token), generator=random, dtype=torch.float64)
    return token, expert, weight


@pytest.mark.parametrize("seed", range(5))
def test_permute_is_the_loops_dispatch(seed: int):
    """The rows that are sent are every expert's tokens one after the other, as the loops collect them."""
    token, expert, weight = slots_of(seed)
    x = torch.randn(17, 3, dtype=torch.float64)
    queues = [[(t, e) for t, e in zip(token.tolist(), expert.tolist(), strict=True) if e == own] for own in range(6)]
    slots = sort_by_expert(token, expert, weight, 6)
    assert torch.equal(permute(x, slots), torch.cat(naive.dispatch(x, queues)))
    assert slots.per_expert.tolist() == [len(queue) for queue in queues]


@pytest.mark.parametrize("seed", range(5))
def test_unpermute_sums_weighted_rows(seed: int):
    """A token gets the weighted sum of its rows, and nothing where it has none."""
    token, expert, weight = slots_of(seed)
    slots = sort_by_expert(token, expert, weight, 6)
    rows = torch.randn(len(token), 3, dtype=torch.float64)
    expected = torch.zeros(17, 3, dtype=torch.float64)
    for row, t, w in zip(rows, slots.token, slots.weight, strict=True):
        expected[t] += row * w
    torch.testing.assert_close(unpermute(rows, slots, 17), expected)


def test_received_rows_are_sorted_by_expert_and_back():
    """Rows come by rank and then by expert; sorted they stand by expert and then by rank, and the way back undoes it."""
    received = torch.tensor([[2, 0, 1], [0, 3, 1]])
    labels = [(r, e) for r in range(2) for e in range(3) for _ in range(int(received[r, e]))]
    order, back = by_own_expert(received, len(labels))
    assert [labels[i] for i in order.tolist()] == sorted(labels, key=lambda label: (label[1], label[0]))
    assert order[back].tolist() == list(range(len(labels)))
    empty = by_own_expert(torch.zeros(2, 0, dtype=torch.int64), 0)
    assert [t.tolist() for t in empty] == [[], []]
