"""Data whose samples differ much in how many of their tokens count."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mtb_core.config import TrainConfig
from mtb_core.config.schema import IGNORE_LABEL
from mtb_core.data.synthetic import SyntheticDataset, synthetic


class RaggedDataset:
    """The synthetic data, of which sample i keeps only ``i % (seq_length + 1)`` targets: some none at all."""

    def __init__(self, base: SyntheticDataset, size: int | None = None) -> None:
        self._base = base
        self.size = size
        self.vocab_size, self.seq_length = base.vocab_size, base.seq_length

    def fetch(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets, see `mtb_core.data.Dataset`."""
        inputs, targets = self._base.fetch(indices)
        kept = np.arange(self.seq_length)[None, :] < (indices % (self.seq_length + 1))[:, None]
        targets[~kept] = IGNORE_LABEL
        return inputs, targets


def ragged(config: TrainConfig) -> RaggedDataset:
    """The data set named ``kit-ragged``."""
    return RaggedDataset(synthetic(config))


def ragged_23(config: TrainConfig) -> RaggedDataset:
    """The data set named ``kit-ragged-23``: an epoch of 23 samples, which no number of ranks divides."""
    return RaggedDataset(synthetic(config), 23)
