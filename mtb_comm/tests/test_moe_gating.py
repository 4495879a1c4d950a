"""Gates and the two losses, against numbers made by hand and finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from mtb_comm.moe.gating import load_balancing_share, probabilities, slot_weights, z_loss_share


def test_load_balancing_by_hand():
    """E * sum(f * P) of a case small enough to do on paper, and 1 where both are even."""
    gates = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
    # both tokens ask for expert 0: f = (1, 0), P = (0.625, 0.375)
    assert load_balancing_share(gates, torch.tensor([2, 0]), 2, 1).item() == 2 * 0.625
    even = torch.full((4, 8), 1 / 8, dtype=torch.float64)
    assert load_balancing_share(even, torch.full((8,), 1), 4, 2).item() == pytest.approx(1)
    # sigmoids that do not sum to one are divided by their sum
    assert load_balancing_share(3 * gates, torch.tensor([2, 0]), 2, 1).item() == pytest.approx(2 * 0.625)


def test_z_loss_by_hand():
    """The mean of logsumexp squared; shares of two ranks sum to the whole."""
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    expected = (math.log(2) ** 2 + (1 + math.log(2)) ** 2) / 2
    assert z_loss_share(logits, 2).item() == pytest.approx(expected)
    assert (z_loss_share(logits[:1], 2) + z_loss_share(logits[1:], 2)).item() == pytest.approx(expected)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_gradients_are_those_of_finite_differences(gate: str):
    """Both losses and the weights of slots differentiate right through the gates."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, dtype=torch.float64, generator=random).requires_grad_()
    requested = torch.tensor([1, 4, 2, 3, 2])
    experts = torch.tensor([[0, 3], [1, 2], [4, 0], [2, 1], [3, 4], [0, 1]])

    def balance(z: torch.Tensor) -> torch.Tensor:
        return load_balancing_share(probabilities(z, gate), requested, 6, 2)

    def weights(z: torch.Tensor) -> torch.Tensor:
        return slot_weights(probabilities(z, gate), experts)

    assert torch.autograd.gradcheck(balance, logits)
    assert torch.autograd.gradcheck(weights, logits)
    assert torch.autograd.gradcheck(lambda z: z_loss_share(z, 6), logits)


def test_weights_of_slots():
    """The gate itself with one expert, so that the router learns; a share of one with several."""
    gates = torch.tensor([[0.5, 0.3, 0.2]])
    assert slot_weights(gates, torch.tensor([[1]])).tolist() == [[pytest.approx(0.3)]]
    assert slot_weights(gates, torch.tensor([[0, 2]])).tolist() == [[pytest.approx(5 / 7), pytest.approx(2 / 7)]]
    vanished = slot_weights(torch.zeros(1, 3), torch.tensor([[0, 2]]))
    assert vanished.tolist() == [[0, 0]]
