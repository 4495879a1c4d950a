"""The naive layer is what others are held against, so it is held against cases done by hand."""

from __future__ import annotations

import pytest
import torch

from mtb_comm.moe import naive
from mtb_comm.moe.settings import RouteSettings

#: Four tokens that all like expert 0 best; 2 and 3 like 2 second, the others 1.
WANTED = [[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 1.0, 2.0], [3.0, 1.0, 2.0]]


def test_first_come_first_served():
    """An expert takes the tokens that come first; the others have no place."""
    queues, chosen, homeless = naive.assign(WANTED, 1, 2, "drop")
    assert queues == [[(0, 0), (1, 0)], [], []]
    assert chosen == [[0]] * 4
    assert homeless == [(2, 0), (3, 0)]


def test_first_choices_before_second_ones():
    """All first choices stand before any second one, whatever the token."""
    queues, _, homeless = naive.assign([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0]], 2, 1, "drop")
    assert queues == [[(0, 0)], [(1, 0)], []]
    assert homeless == [(0, 1), (1, 1)]


def test_next_goes_on_to_experts_with_room():
    """A slot that finds its expert full asks the next-best ones, and is dropped where none has room."""
    queues, chosen, homeless = naive.assign(WANTED, 1, 1, "next")
    assert queues == [[(0, 0)], [(1, 0)], [(2, 0)]]
    assert chosen == [[0], [1], [2], [0]]
    assert homeless == [(3, 0)]


def test_experts_choose_their_best_tokens():
    """Every expert takes exactly its capacity; of equal scores the earlier token."""
    assert naive.choose([[0.1, 0.5], [0.9, 0.5], [0.3, 0.5]], 2) == [[(1, 0), (2, 0)], [(0, 1), (1, 1)]]


@pytest.mark.parametrize(("overflow", "second"), [("drop", 0.0), ("residual", 1.0)])
def test_outputs_by_hand(overflow: str, second: float):
    """With experts that give their bias alone, the output of a token is a weighted sum of biases that one can see."""
    x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    biases = [10.0, 100.0]
    experts = [
        [torch.zeros(shape, dtype=torch.float64) for shape in ((1, 1), (1,), (1, 1))]
        + [torch.tensor([b], dtype=torch.float64)]
        for b in biases
    ]
    router = torch.zeros(1, 2, dtype=torch.float64)
    settings = RouteSettings(
        num_experts=2, top_k=1, capacity_factor=1.0, overflow=overflow, hidden_size=1, ffn_size=1, dtype="fp64"
    )
    wanted = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)  # capacity is 1: the second finds no place
    passed = naive.moe([x], router, experts, wanted, settings)
    gate = torch.softmax(wanted, dim=1)[0, 0].item()
    assert passed.output.flatten().tolist() == pytest.approx([gate * 10, second * gate * 2])
    assert passed.dropped == 1
