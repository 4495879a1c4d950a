"""Samples from a sequence of tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mtb_core.api.errors import ConfigError
from mtb_core.config import IGNORE_LABEL


class TokenDataset:
    """Windows of `seq_length` tokens, side by side; the target of each token is the next one.

    The last window may be shorter: it is padded, with ignored targets, so every token but the very first is predicted
    exactly once an epoch.

    Args:
        tokens: unsigned integers [count]; may be memory-mapped, and is never copied as a whole.
        origin: where they come from, for messages.

    Raises:
        ConfigError: fewer than two tokens, so there is nothing to predict.
    """

    def __init__(self, tokens: NDArray[np.unsignedinteger], vocab_size: int, seq_length: int, *, origin: str) -> None:
        if len(tokens) < 2:
            msg = (
                f"{origin} holds {len(tokens)} token{'' if len(tokens) == 1 else 's'}; a sample needs at least 2, "
                "one to read and the next to predict. Give it more text."
            )
            raise ConfigError(msg)
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self._origin = origin
        self._tokens = np.asarray(tokens)  # a plain view: indexing a memmap itself is several times slower
        predicted = len(tokens) - 1
        self._full = predicted // seq_length
        self.size = -(-predicted // seq_length)
        step = self._tokens.strides[0]
        self._windows = np.lib.stride_tricks.as_strided(
            self._tokens, (self._full, seq_length + 1), (seq_length * step, step), writeable=False
        )
        # Whether the dtype can hold what the vocabulary does not.
        self._must_check = vocab_size <= np.iinfo(self._tokens.dtype).max

    def fetch(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets of the samples `indices`, see `Dataset`.

        Raises:
            ConfigError: a token is outside the vocabulary, so the data is damaged.
        """
        ragged = np.flatnonzero(indices == self._full)
        if ragged.size:
            return self._fetch_ragged(indices, ragged)
        windows = self._windows[indices]
        self._check(windows)
        return windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)

    def _fetch_ragged(
        self, indices: NDArray[np.int64], ragged: NDArray[np.intp]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same where some of `indices`, at `ragged`, are the short last window."""
        shape = (len(indices), self.seq_length)
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE_LABEL, np.int64)
        whole = np.flatnonzero(indices != self._full)
        if whole.size:
            inputs[whole], targets[whole] = self.fetch(indices[whole])
        last = self._tokens[self._full * self.seq_length :]
        self._check(last)
        inputs[ragged, : len(last) - 1] = last[:-1]
        targets[ragged, : len(last) - 1] = last[1:]
        return inputs, targets

    def _check(self, tokens: NDArray[np.unsignedinteger]) -> None:
        if self._must_check and tokens.size and tokens.max() >= self.vocab_size:
            msg = (
                f"{self._origin} holds the token {tokens.max()}, but its vocabulary has {self.vocab_size} tokens "
                f"(0 to {self.vocab_size - 1}): the file is damaged or its header wrong. Prepare it anew with "
                "`mtb data prepare`."
            )
            raise ConfigError(msg)
