"""The way of training samples to a rank: the batches of its steps, made in the background."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from mtb_core.api.errors import ConfigError
from mtb_core.config import IGNORE_LABEL

from .dataset import PADDING, Dataset, fetch_padded
from .order import EpochOrder

_ENDLESS = 1 << 62  # samples in the one epoch of an endless data set
# Small steps are made several at once, or the cost of numpy's calls would be a visible part of a step.
_PLANNED = 4096  # sample numbers that are worked out at once
_FETCHED = 8192  # tokens that are fetched at once


@attrs.frozen(eq=False)
class StepBatch:
    """One rank's part of the global batch of one step.

    Attributes:
        inputs: int64 [accumulation, batch, positions], on the rank's device.
        targets: the same shape; ignored where there is nothing to predict.
        valid_by_micro_batch: of this rank: targets that are not ignored, in each micro-batch.
        samples: of the GLOBAL batch, padding not counted.
        epoch: from 0.
        sample_ids: int64 [accumulation, batch]; -1 is padding.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    valid_by_micro_batch: tuple[int, ...]
    samples: int
    epoch: int
    sample_ids: NDArray[np.int64]

    @property
    def valid_tokens(self) -> int:
        """Valid targets of this rank in the whole step."""
        return sum(self.valid_by_micro_batch)


@attrs.frozen
class _Steps:
    """Samples of some steps: `ids` [steps, accumulation, batch] of this rank, `samples` [steps] of all ranks."""

    epoch: int
    ids: NDArray[np.int64]
    samples: list[int]


class Loader:
    """The batches of this rank's steps, one after another, without end; a context manager.

    The position in the data is one number, `samples_seen`: samples consumed by all ranks since the start of training.
    It alone gives epoch (``samples_seen // size``) and offset in the epoch, so it does not depend on rank, world size,
    batch split or prefetching, and a global batch of another size goes on from it. From offset p, micro-batch m of
    data rank r takes the positions ``p + (m * data_size + r) * batch_size`` and following of the epoch's order.

    A global batch never reaches over the end of an epoch: the last one of an epoch is shorter, padded to the same
    shape by samples that are all ignored, and the next epoch begins with a step of its own.

    Args:
        seed: of the order. An endless data set is read in its own order.
        data_rank: which stream of samples this rank sees, of `data_size`.
        batch_size: samples of a micro-batch.
        accumulation: micro-batches of a step.
        positions: the positions of each sample that this rank has, in this order; None: all.
        samples_seen: where to begin.
        prefetch: steps that are made ahead, at least 1.

    Raises:
        ConfigError: the data set has no sample.
        ValueError: `prefetch` is below 1.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        data_rank: int,
        data_size: int,
        batch_size: int,
        accumulation: int,
        positions: Sequence[int] | None = None,
        device: str | torch.device = "cpu",
        samples_seen: int = 0,
        prefetch: int = 2,
    ) -> None:
        if dataset.size is not None and dataset.size < 1:
            msg = f"The data set {type(dataset).__name__} has {dataset.size} samples; training needs at least one."
            raise ConfigError(msg)
        if prefetch < 1:
            msg = f"prefetch must be at least 1, got {prefetch}"
            raise ValueError(msg)
        self.samples_seen = samples_seen
        self._device = torch.device(device)
        self._next: StepBatch | None = None
        self._error: BaseException | None = None
        # One permission to make a batch ahead for each that may wait; False ends the thread.
        self._permits: SimpleQueue[bool] = SimpleQueue()
        self._ready: SimpleQueue[StepBatch | BaseException] = SimpleQueue()
        for _ in range(prefetch):
            self._permits.put(True)
        plan = _plan(dataset, seed, samples_seen, (accumulation, data_size, batch_size), data_rank)
        kept = None if positions is None else np.asarray(positions, dtype=np.int64)
        self._thread = threading.Thread(
            target=_produce,
            args=(dataset, plan, kept, self._device.type == "cuda", self._permits, self._ready),
            name="mtb-data",
            daemon=True,
        )
        self._thread.start()

    def next(self) -> StepBatch:
        """The batch of the next step; waits until it is made. What the data set raised is raised here."""
        batch = self.peek()
        self._next = None
        self.samples_seen += batch.samples
        return batch

    def peek(self) -> StepBatch:
        """The batch that `next` is going to return, without consuming it."""
        if self._next is None:
            self._next = self._receive()
        return self._next

    def close(self) -> None:
        """End the background thread, after the batch it is at, and release what was made ahead. May be repeated."""
        while True:
            try:
                self._permits.get_nowait()
            except Empty:
                break
        self._permits.put(False)
        self._thread.join()
        self._next = None
        self._error = RuntimeError("the loader is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self) -> StepBatch:
        if self._error is not None:
            raise self._error
        batch = self._ready.get()
        if isinstance(batch, BaseException):
            self._error = batch
            raise batch
        self._permits.put(True)
        if self._device.type == "cpu":
            return batch
        # Copied here and not in the thread, so that it is ordered with the work of the caller's stream.
        return attrs.evolve(
            batch,
            inputs=batch.inputs.to(self._device, non_blocking=True),
            targets=batch.targets.to(self._device, non_blocking=True),
        )


def _produce(
    dataset: Dataset,
    plan: Iterator[_Steps],
    kept: NDArray[np.int64] | None,
    pin: bool,
    permits: SimpleQueue[bool],
    ready: SimpleQueue[StepBatch | BaseException],
) -> None:
    """The background thread: one batch for each permit."""
    try:
        for steps in plan:
            for batch in _assemble(dataset, steps, kept, pin):
                if not permits.get():
                    return
                ready.put(batch)
    except BaseException as error:  # noqa: BLE001  (whatever it is, the caller of next() must see it)
        ready.put(error)


def _assemble(dataset: Dataset, steps: _Steps, kept: NDArray[np.int64] | None, pin: bool) -> list[StepBatch]:
    shape = (*steps.ids.shape, dataset.seq_length)
    inputs, targets = (array.reshape(shape) for array in fetch_padded(dataset, steps.ids.ravel()))
    if kept is not None:
        inputs, targets = inputs[..., kept], targets[..., kept]
    valid = np.count_nonzero(targets != IGNORE_LABEL, axis=(2, 3))
    tensors = [torch.from_numpy(inputs), torch.from_numpy(targets)]
    if pin:
        tensors = [tensor.pin_memory() for tensor in tensors]
    parts = zip(*tensors, valid.tolist(), steps.samples, steps.ids, strict=True)
    return [StepBatch(x, y, tuple(tokens), samples, steps.epoch, ids) for x, y, tokens, samples, ids in parts]


def _plan(
    dataset: Dataset, seed: int, samples_seen: int, shape: tuple[int, int, int], data_rank: int
) -> Iterator[_Steps]:
    """The samples of data rank `data_rank` in each step from `samples_seen` on; `shape` is that of a global batch."""
    size = dataset.size
    accumulation, data_size, batch_size = shape
    total = accumulation * data_size * batch_size
    order = None if size is None else EpochOrder(size, seed)
    epoch_size = _ENDLESS if size is None else size
    epoch, offset = divmod(samples_seen, epoch_size)
    within = np.arange(total, dtype=np.int64).reshape(shape)[:, data_rank]
    planned = max(1, _PLANNED // within.size)
    fetched = max(1, _FETCHED // (within.size * dataset.seq_length))
    while True:
        starts = np.arange(offset, min(offset + planned * total, epoch_size), total, dtype=np.int64)
        ids = starts[:, None, None] + within
        real = ids < epoch_size
        if order is not None:
            ids[real] = order.indices(epoch, ids[real])
        ids[~real] = PADDING
        samples = np.minimum(total, epoch_size - starts).tolist()
        for first in range(0, len(starts), fetched):
            yield _Steps(epoch, ids[first : first + fetched], samples[first : first + fetched])
        offset += len(starts) * total
        if offset >= epoch_size:
            epoch, offset = epoch + 1, 0
