"""Samples that need no file: sample i depends on (seed, i) only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mtb_core.config import TrainConfig

from .hashing import GOLDEN, derive_keys, mix

_STREAM = 0x73796E7468  # keeps the tokens' keys apart from those of other streams of the same seed
DEFAULT_VOCAB_SIZE = 256


class SyntheticDataset:
    """Endless random text in which every second token repeats the one before it.

    Half of the targets can be learned (a model that has learned to copy reaches a loss of ln(vocab_size) / 2), the
    other half are uniform noise, so a falling loss shows that training works and never gets below that floor.
    """

    size = None

    def __init__(self, seed: int, vocab_size: int, seq_length: int) -> None:
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self._key = derive_keys(_STREAM, seed)
        self._counters = GOLDEN * np.arange(seq_length // 2 + 1, dtype=np.uint64)

    def fetch(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets of the samples `indices`, see `Dataset`."""
        rows = mix(indices.astype(np.uint64) * GOLDEN + self._key)
        words = mix(rows[:, None] + self._counters)
        # The upper 32 bits scaled to the vocabulary: cheaper than a remainder, with a bias below vocab_size / 2^32.
        words >>= np.uint64(32)
        words *= np.uint64(self.vocab_size)
        words >>= np.uint64(32)
        tokens = np.repeat(words.view(np.int64), 2, axis=1)
        return tokens[:, : self.seq_length].copy(), tokens[:, 1 : self.seq_length + 1].copy()


def synthetic(config: TrainConfig) -> SyntheticDataset:
    """The data set named ``synthetic``."""
    vocab_size = DEFAULT_VOCAB_SIZE if config.vocab_size is None else config.vocab_size
    return SyntheticDataset(config.seed, vocab_size, config.seq_length)
