"""The routing is what its formulas say, written as loops; it is causal, and the same on every run."""

from __future__ import annotations

import math

import pytest
import torch

from mtb_ep.routing import FIGURES, route


def logits(batch: int = 3, length: int = 7, experts: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, length, experts, generator=torch.Generator().manual_seed(seed)) * 2


def naive(sample: list[list[float]], top_k: int, capacity: int | None) -> tuple[list[list[int]], list[list[bool]]]:
    """Experts of each token of one sample, and whether they had a place for it."""
    taken = [0] * len(sample[0])
    chosen, placed = [], []
    for row in sample:
        best = sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k]
        got = [capacity is None or taken[e] < capacity for e in best]
        for e in best:
            taken[e] += 1
        chosen.append(best)
        placed.append(got)
    return chosen, placed


@pytest.mark.parametrize(("top_k", "factor"), [(1, None), (2, None), (2, 1.0), (5, 0.5)])
def test_experts_places_and_figures(top_k: int, factor: float | None) -> None:
    """Experts, places, weights and all five figures equal those of loops over samples, tokens and experts."""
    given = logits()
    routed = route(given, top_k, factor)
    batch, length, n = given.shape
    room = None if factor is None else math.ceil(factor * top_k * length / n)
    for b in range(batch):
        chosen, placed = naive(given[b].tolist(), top_k, room)
        assert routed.experts[b].tolist() == chosen
        assert room is None or (routed.placed is not None and routed.placed[b].tolist() == placed)
        odds = given[b].double().softmax(-1)
        share = [sum(row.count(e) for row in chosen) / (length * top_k) for e in range(n)]
        expected = {
            "aux_loss": n * sum(share[e] * float(odds[:, e].mean()) for e in range(n)),
            "z_loss": sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in given[b].tolist()) / length,
            "load_imbalance": n * max(share),
            "dropped_share": sum(row.count(False) for row in placed) / (length * top_k),
            "router_entropy": -sum(float(p * p.log()) for p in odds.flatten()) / length,
        }
        assert dict(zip(FIGURES, routed.figures[b].tolist(), strict=True)) == pytest.approx(
            expected, rel=1e-5, abs=1e-6
        )
        for t in range(length):
            of_chosen = odds[t, chosen[t]]
            wanted = of_chosen if top_k == 1 else of_chosen / of_chosen.sum()
            assert routed.weights[b, t].tolist() == pytest.approx(wanted.tolist(), rel=1e-5)


def test_equal_logits_go_to_the_lower_number() -> None:
    """Ties are decided by the expert's number, so that no two runs differ."""
    routed = route(torch.zeros(2, 300, 64), 3, None)
    assert torch.equal(routed.experts, torch.arange(3).expand(2, 300, 3))
    tied = torch.tensor([[[1.0, 3.0, 3.0, 0.0, 3.0]]])
    assert route(tied, 2, None).experts.tolist() == [[[1, 2]]]


def test_a_token_does_not_depend_on_later_ones() -> None:
    """With a capacity, what comes later takes no place from what came before."""
    given, other = logits(seed=1), logits(seed=1)
    other[:, 4:] = logits(seed=2)[:, 4:]
    first, second = route(given, 2, 0.6), route(other, 2, 0.6)
    assert first.placed is not None
    assert second.placed is not None
    assert not torch.equal(first.placed[:, 4:], second.placed[:, 4:])
    assert torch.equal(first.placed[:, :4], second.placed[:, :4])
    assert not first.placed[:, :4].all()


def test_samples_do_not_share_places() -> None:
    """A sample is routed alike, whichever samples stand beside it."""
    given = logits()
    whole = route(given, 2, 0.6)
    for b in range(len(given)):
        alone = route(given[b : b + 1], 2, 0.6)
        assert whole.placed is not None
        assert alone.placed is not None
        assert torch.equal(alone.placed[0], whole.placed[b])
        assert torch.allclose(alone.figures[0], whole.figures[b], rtol=1e-6)


def test_gradients_of_the_losses() -> None:
    """The balance pushes probability from crowded experts, with the load as a constant; the z-loss shrinks logits."""
    given = logits().requires_grad_()
    routed = route(given, 2, None)
    odds = given.softmax(-1)
    load = torch.nn.functional.one_hot(routed.experts, 5).float().mean(dim=(1, 2))
    (wanted,) = torch.autograd.grad(5 * (load * odds.mean(1)).sum(), given)
    (found,) = torch.autograd.grad(routed.figures[:, 0].sum(), given, retain_graph=True)
    assert torch.allclose(found, wanted, atol=1e-7)
    (found,) = torch.autograd.grad(routed.figures[:, 1].sum(), given)
    assert torch.allclose(found, 2 * given.logsumexp(-1, keepdim=True) * odds / given.shape[1], atol=1e-6)
