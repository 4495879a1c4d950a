"""The order of an epoch: a permutation that is never stored."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtb_core.data.order import EpochOrder

SEEDS = st.integers(0, 2**63 - 1)
relaxed = settings(deadline=None, max_examples=60)


@relaxed
@given(size=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**9))
def test_permutation(size, seed, epoch):
    """Every sample stands at exactly one position, for any size, seed and epoch."""
    order = EpochOrder(size, seed).indices(epoch, np.arange(size))

    assert list(range(size)) == sorted(order.tolist())


@relaxed
@given(size=st.integers(1, 2**62), seed=SEEDS, data=st.data())
def test_any_part_alone(size, seed, data):
    """A position's sample does not depend on which others are asked for; sizes far beyond memory work."""
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)), np.int64)
    order = EpochOrder(size, seed)
    together = order.indices(3, positions)

    assert [int(order.indices(3, positions[i : i + 1])[0]) for i in range(len(positions))] == together.tolist()
    assert 0 <= together.min() <= together.max() < size


@relaxed
@given(size=st.integers(12, 1000), seed=SEEDS, epoch=st.integers(0, 1000))
def test_epochs_and_seeds_differ(size, seed, epoch):
    """Another epoch and another seed give another order."""
    positions = np.arange(size)
    order = EpochOrder(size, seed).indices(epoch, positions).tolist()

    assert EpochOrder(size, seed).indices(epoch + 1, positions).tolist() != order
    assert EpochOrder(size, (seed + 1) % 2**63).indices(epoch, positions).tolist() != order


@pytest.mark.parametrize("size", [3, 10, 1000])
def test_looks_random(size):
    """Over many epochs each sample comes first about equally often, and neighbours are as far apart as by chance."""
    order = EpochOrder(size, 7)
    epochs = 1000
    heads = np.array([order.indices(epoch, np.arange(2)) for epoch in range(epochs)])
    counts = np.bincount(heads[:, 0], minlength=size)
    chi_squared = float(((counts - epochs / size) ** 2 / (epochs / size)).sum())
    distance = float(np.abs(heads[:, 0] - heads[:, 1]).mean())

    assert chi_squared < size - 1 + 5 * (2 * size) ** 0.5  # five standard deviations
    assert distance == pytest.approx((size + 1) / 3, rel=0.06)


def test_known_values():
    """The order is part of what a checkpoint promises: it never changes between versions."""
    assert EpochOrder(10, 42).indices(0, np.arange(10)).tolist() == [9, 3, 0, 7, 6, 2, 1, 8, 5, 4]
    assert EpochOrder(10, 42).indices(1, np.arange(10)).tolist() == [7, 9, 3, 5, 8, 0, 1, 6, 2, 4]


def test_outside_is_refused():
    """A position beyond the epoch is an error, not a wrong sample."""
    with pytest.raises(ValueError, match=r"range\(5\), got 2 to 5"):
        EpochOrder(5, 0).indices(0, np.array([2, 5]))
