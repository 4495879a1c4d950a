"""Samples from a sequence of tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtb_core import ConfigError
from mtb_core.config import IGNORE_LABEL
from mtb_core.data.tokens import TokenDataset


def dataset(count, seq_length, dtype=np.uint16):
    return TokenDataset(np.arange(count).astype(dtype), 60000, seq_length, origin="The test")


@settings(deadline=None, max_examples=100)
@given(count=st.integers(2, 200), seq_length=st.integers(1, 50), seed=st.integers(0, 99))
def test_every_token_once(count, seq_length, seed):
    """Over an epoch, in any order and grouping, every token but the first is a target exactly once, after its own."""
    data = dataset(count, seq_length)
    ids = np.random.default_rng(seed).permutation(data.size)
    parts = [data.fetch(part) for part in np.array_split(ids, 3) if part.size]
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    valid = targets != IGNORE_LABEL

    assert sorted(targets[valid].tolist()) == list(range(1, count))
    assert (targets[valid] == inputs[valid] + 1).all()
    assert (inputs[~valid] == 0).all()


def test_layout():
    """Sample i begins at token i * seq_length; only the last one is padded, at its end."""
    inputs, targets = dataset(11, 4).fetch(np.array([2, 0, 2]))

    assert inputs.tolist() == [[8, 9, 0, 0], [0, 1, 2, 3], [8, 9, 0, 0]]
    assert targets.tolist() == [[9, 10, -100, -100], [1, 2, 3, 4], [9, 10, -100, -100]]


@pytest.mark.parametrize("dtype", [np.uint8, "<u2", "<u4"])
def test_types(dtype):
    """Whatever the tokens' type, samples are int64, contiguous and writable."""
    for array in dataset(100, 8, dtype).fetch(np.array([3, 1])):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
        assert array.flags.writeable


@pytest.mark.parametrize("count", [0, 1])
def test_too_few(count):
    """Fewer than two tokens are refused, naming where they come from."""
    with pytest.raises(ConfigError, match=rf"The test holds {count} token.*at least 2"):
        dataset(count, 4)


@pytest.mark.parametrize("sample", [1, 2])
def test_token_outside_the_vocabulary(sample):
    """A token that the vocabulary lacks is an error when its sample is fetched, the short last one included."""
    tokens = np.zeros(11, np.uint8)
    tokens[sample * 4 + 1] = 10
    data = TokenDataset(tokens, 10, 4, origin="The test")

    data.fetch(np.array([0]))
    with pytest.raises(ConfigError, match=r"The test holds the token 10, but its vocabulary has 10"):
        data.fetch(np.array([0, sample]))
