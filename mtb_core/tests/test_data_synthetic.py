"""Samples that need no file."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtb_core.config import TrainConfig
from mtb_core.data.synthetic import SyntheticDataset, synthetic


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**63 - 1), ids=st.lists(st.integers(0, 2**62), min_size=1, max_size=9))
def test_depends_on_seed_and_number_alone(seed, ids):
    """A sample is the same alone, in any company, and from another object."""
    inputs, targets = SyntheticDataset(seed, 100, 7).fetch(np.array(ids))

    for row, sample in enumerate(ids):
        alone = SyntheticDataset(seed, 100, 7).fetch(np.array([sample]))
        assert (alone[0][0].tolist(), alone[1][0].tolist()) == (inputs[row].tolist(), targets[row].tolist())


@pytest.mark.parametrize("seq_length", [1, 2, 7, 8])
@pytest.mark.parametrize("vocab_size", [2, 256, 50257])
def test_shape_and_range(seq_length, vocab_size):
    """Both arrays are int64 [n, seq_length], contiguous, writable, of tokens of the vocabulary; targets are shifted."""
    inputs, targets = SyntheticDataset(1, vocab_size, seq_length).fetch(np.arange(500))

    for array in (inputs, targets):
        assert (array.dtype, array.shape) == (np.int64, (500, seq_length))
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert 0 <= array.min() <= array.max() < vocab_size
    assert (inputs[:, 1:] == targets[:, :-1]).all()


def test_half_can_be_learned():
    """Every second target repeats its input; the others are as good as uniform."""
    inputs, targets = SyntheticDataset(0, 16, 64).fetch(np.arange(2000))

    assert (targets[:, ::2] == inputs[:, ::2]).all()
    assert (targets[:, 1::2] == inputs[:, 1::2]).mean() == pytest.approx(1 / 16, rel=0.05)
    assert np.bincount(inputs[:, ::2].ravel(), minlength=16) / (2000 * 32) == pytest.approx(1 / 16, rel=0.1)


def test_seeds_differ():
    """Another seed gives other samples."""
    numbers = np.arange(4)

    assert (SyntheticDataset(0, 256, 32).fetch(numbers)[0] != SyntheticDataset(1, 256, 32).fetch(numbers)[0]).any()


def test_longer_samples_begin_alike():
    """The beginning of a sample does not depend on its length."""
    short = SyntheticDataset(0, 256, 6).fetch(np.arange(3))[0]

    assert (SyntheticDataset(0, 256, 20).fetch(np.arange(3))[0][:, :6] == short).all()


def test_from_configuration():
    """The named data set follows the configuration; without a vocabulary it has 256 tokens."""
    made = synthetic(TrainConfig(seq_length=9, seed=3, vocab_size=11))

    assert (made.size, made.vocab_size, made.seq_length) == (None, 11, 9)
    assert synthetic(TrainConfig()).vocab_size == 256
