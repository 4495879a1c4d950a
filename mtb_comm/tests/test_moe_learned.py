"""The byte model learns, its router with it, and ranks agree on what they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from mtb_comm.moe.learned import learn
from mtb_comm.moe.settings import RouteSettings
from mtb_core import gather_objects, run_ranks

SETTINGS = RouteSettings(
    tokens_per_rank=64, hidden_size=16, ffn_size=32, num_experts=3, distribution="learned", data="", router_steps=40
)


def train(settings: RouteSettings, ctx: Any, _worker: Any) -> Any:
    learned = learn(settings, ctx, lambda: None)
    return learned.loss_first, learned.loss_last, gather_objects(ctx, (learned.weights["router"], learned.activations))


@pytest.fixture
def settings(tmp_path: Path) -> RouteSettings:
    """With a text that repeats itself."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 20)
    return attrs.evolve(SETTINGS, data=str(text))


def test_it_learns(settings: RouteSettings):
    """The loss starts at ln(256) and falls below half; all ranks have the same router and their own activations."""
    outcome = run_ranks(train, settings, nproc=2, device="cpu")
    assert outcome.exit_reason == "done", outcome.failure.traceback
    first, last, ranks = outcome.value
    assert first == pytest.approx(5.55, abs=0.3)
    assert last < first / 2
    (router, x), (other_router, other_x) = ranks
    assert torch.equal(router, other_router)
    assert x.shape == (64, 16)
    assert not torch.equal(x, other_x)


def test_the_balancing_loss_balances(settings: RouteSettings):
    """With a heavy load-balancing loss the trained router spreads tokens more evenly than with none."""
    routers = []
    for weight in (0.0, 1.0):
        case = attrs.evolve(settings, aux_weight=weight, top_k=1, capacity_factor=None, router_steps=80)
        outcome = run_ranks(train, case, nproc=1, device="cpu")
        ((router, x),) = outcome.value[2]
        load = torch.bincount((x @ router).argmax(dim=1), minlength=3)
        routers.append(load.max().item() / 64 * 3)
    assert routers[1] < routers[0]
