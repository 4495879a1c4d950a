"""Data sets: numbered samples of equal shape."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mtb_core.api.errors import ConfigError
from mtb_core.config import IGNORE_LABEL

#: Stands in a list of sample numbers for "no sample": padding.
PADDING = -1


class Dataset(Protocol):
    """Samples by number. A sample must depend on its number alone, never on who asks or with which others.

    Attributes:
        size: samples in an epoch; None: endless.
        vocab_size: tokens lie in ``range(vocab_size)``.
        seq_length: tokens of a sample.
    """

    @property
    def size(self) -> int | None:
        """Samples in an epoch; None: endless."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""

    @property
    def seq_length(self) -> int:
        """Tokens of a sample."""

    def fetch(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets of the samples `indices` [n], both int64 [n, seq_length], freshly allocated.

        Targets are shifted already (the token after each input), `IGNORE_LABEL` where there is none to predict. Called
        in the loader's thread, one call at a time; what it raises ends the run of that rank.
        """


def fetch_padded(dataset: Dataset, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Like ``dataset.fetch(ids)``, where `PADDING` among `ids` [n] yields zeros whose targets are all ignored.

    Raises:
        ConfigError: the data set returns arrays of another shape or dtype than it must.
    """
    real = ids >= 0
    if real.all():
        return _fetch(dataset, ids)
    inputs = np.zeros((len(ids), dataset.seq_length), np.int64)
    targets = np.full_like(inputs, IGNORE_LABEL)
    if real.any():
        inputs[real], targets[real] = _fetch(dataset, ids[real])
    return inputs, targets


def _fetch(dataset: Dataset, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    inputs, targets = dataset.fetch(ids)
    shape = (len(ids), dataset.seq_length)
    if inputs.shape != shape or targets.shape != shape or inputs.dtype != np.int64 or targets.dtype != np.int64:
        msg = (
            f"The data set {type(dataset).__name__} returned inputs {inputs.dtype}{list(inputs.shape)} and targets "
            f"{targets.dtype}{list(targets.shape)}; fetch(indices) must return two int64 arrays of shape "
            f"{list(shape)} ([samples, seq_length])."
        )
        raise ConfigError(msg)
    return inputs, targets


def content_digest(dataset: Dataset) -> str | None:
    """A digest that tells other data apart, cheaply: of the number of samples and of 64 of them, spread evenly.

    None for endless data, which is made by rule and not by content.
    """
    if dataset.size is None:
        return None
    import xxhash  # noqa: PLC0415  (only runs with checkpoints need it)

    inputs, targets = dataset.fetch(np.linspace(0, dataset.size - 1, min(dataset.size, 64)).astype(np.int64))
    state = xxhash.xxh3_128(f"{dataset.size}/{dataset.vocab_size}/{dataset.seq_length}".encode())
    state.update(inputs.tobytes())
    state.update(targets.tobytes())
    return state.hexdigest()
