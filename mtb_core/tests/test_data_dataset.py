"""What a data set must return."""

import numpy as np
import pytest

from mtb_core import ConfigError
from mtb_core.data import Dataset
from mtb_core.data.dataset import fetch_padded
from mtb_core.data.synthetic import SyntheticDataset


class Wrong:
    size, vocab_size, seq_length = 10, 10, 3

    def __init__(self, shape, dtype):
        self._array = np.zeros(shape, dtype)

    def fetch(self, indices):
        return self._array, self._array


def test_padding():
    """Padding is zeros whose targets are ignored; the other samples are as they are without it."""
    data: Dataset = SyntheticDataset(0, 50, 4)
    inputs, targets = fetch_padded(data, np.array([-1, 7, -1, 3]))
    plain = data.fetch(np.array([7, 3]))

    assert (inputs[[1, 3]].tolist(), targets[[1, 3]].tolist()) == (plain[0].tolist(), plain[1].tolist())
    assert (inputs[[0, 2]] == 0).all()
    assert (targets[[0, 2]] == -100).all()


def test_all_padding():
    """A rank may have no sample at all."""
    inputs, targets = fetch_padded(SyntheticDataset(0, 50, 4), np.array([-1, -1]))

    assert inputs.shape == (2, 4)
    assert (targets == -100).all()


@pytest.mark.parametrize(("shape", "dtype"), [((2, 4), np.int64), ((1, 3), np.int64), ((2, 3), np.int32)])
def test_wrong_arrays(shape, dtype):
    """A data set that returns other arrays than it must is named, with what it returned."""
    with pytest.raises(ConfigError, match=r"data set Wrong returned .*two int64 arrays of shape \[2, 3\]"):
        fetch_padded(Wrong(shape, dtype), np.array([0, 1]))
