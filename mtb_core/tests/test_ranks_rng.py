"""Tests of mtb_core.ranks.rng."""

import json
import random

import numpy as np
import pytest
import torch

from mtb_core.api.errors import RunFailed
from mtb_core.ranks.rng import capture_rng, reseed, restore_rng


def draw():
    return torch.rand(2).tolist(), np.random.rand(), np.random.randn(), random.random(), random.gauss(0, 1)


def test_round_trip_through_json():
    """After a way through JSON every generator goes on where it was, the half-used pairs of Gaussians included."""
    np.random.randn()
    random.gauss(0, 1)
    state = json.loads(json.dumps(capture_rng(), allow_nan=False))
    expected = draw()
    draw()
    restore_rng(state)
    assert draw() == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("numpy"),
        lambda s: s.update(torch_cpu=s["torch_cpu"][:-2]),
        lambda s: s.update(torch_cpu="zz"),
        lambda s: s["numpy"].update(kind="PCG64"),
        lambda s: s["numpy"].update(keys="00"),
        lambda s: s["python"].update(words=s["python"]["words"][:-8]),
        lambda s: s["python"].update(gauss=5),
        lambda s: s.update(python=None),
    ],
)
def test_damage_changes_nothing(damage):
    """A damaged state is refused as a whole: no generator is changed."""
    state, before = capture_rng(), capture_rng()
    damage(state)
    with pytest.raises(RunFailed, match="damaged or incomplete"):
        restore_rng(state)
    assert capture_rng() == before


def test_no_cuda_state_for_cuda():
    """A state that was saved without CUDA does not do for a rank on CUDA."""
    with pytest.raises(RunFailed, match="saved without CUDA"):
        restore_rng(capture_rng(), "cuda:0")


def test_reseed_is_reproducible_and_distinct():
    """The same rank, world and step give the same streams; any other gives others."""
    saved = [capture_rng()]
    seen = {}
    for step, world, rank in ((5, 2, 0), (5, 2, 1), (5, 3, 0), (6, 2, 0)):
        for _ in range(2):
            reseed(saved, step=step, world_size=world, rank=rank, device="cpu")
            seen.setdefault((step, world, rank), []).append(str(draw()))
    assert all(one == other for one, other in seen.values())
    assert len({one for one, _ in seen.values()}) == 4
