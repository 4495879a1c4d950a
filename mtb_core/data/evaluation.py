"""Batches for evaluation: every sample once, in the data's own order, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from mtb_core.api.errors import ConfigError
from mtb_core.config import IGNORE_LABEL

from .dataset import PADDING, Dataset, fetch_padded


def eval_batches(
    dataset: Dataset,
    *,
    data_rank: int,
    data_size: int,
    batch_size: int,
    batches: int = 0,
    positions: Sequence[int] | None = None,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """This rank's batches: inputs and targets, int64 [batch_size, positions] on `device`, and the number of real samples.

    A sample is real if any of its targets is valid, whichever rank has that position.

    Batch k of data rank r holds the samples from ``(k * data_size + r) * batch_size`` on. All ranks yield the same
    number of batches; where the data has ended, samples are padding whose targets are all ignored, so that sums over
    valid targets count every sample once.

    Args:
        dataset: what to evaluate on.
        data_rank: which part this rank sees, of `data_size`.
        data_size: number of parts.
        batch_size: samples of a batch.
        batches: batches of each rank; 0: as many as cover the data.
        positions: the positions of each sample that this rank has, in this order; None: all.
        device: where the tensors are to be.

    Raises:
        ConfigError: `batches` is 0 and the data is endless.
    """
    size = dataset.size
    if size is None:
        if not batches:
            msg = (
                "--eval-batches is 0, which means all samples, but the evaluation data is endless; "
                "set --eval-batches to 1 or more, or evaluate on a file."
            )
            raise ConfigError(msg)
        count, size = batches, batches * data_size * batch_size
    else:
        count = -(-size // (data_size * batch_size))
        count = min(batches, count) if batches else count
    starts = (np.arange(count, dtype=np.int64) * data_size + data_rank) * batch_size
    kept = None if positions is None else np.asarray(positions, dtype=np.int64)
    return _batches(dataset, starts, batch_size, size, kept, device)


def _batches(
    dataset: Dataset,
    starts: np.ndarray,
    batch_size: int,
    size: int,
    kept: np.ndarray | None,
    device: str | torch.device,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    offsets = np.arange(batch_size, dtype=np.int64)
    for start in starts:
        ids = start + offsets
        inputs, targets = fetch_padded(dataset, np.where(ids < size, ids, PADDING))
        real = int((targets != IGNORE_LABEL).any(axis=1).sum())
        if kept is not None:
            inputs, targets = inputs[:, kept], targets[:, kept]
        yield torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device), real
