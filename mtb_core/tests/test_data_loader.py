"""The way of training samples to a rank."""

import threading
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtb_core import ConfigError
from mtb_core.config import IGNORE_LABEL
from mtb_core.data.loader import Loader
from mtb_core.data.order import EpochOrder
from mtb_core.data.synthetic import SyntheticDataset
from mtb_core.data.tokens import TokenDataset

from .data_numbers import Numbers


def make(size, rank=0, ranks=1, batch=1, accumulation=1, **kwargs):
    data = Numbers(size) if isinstance(size, int | None) else size
    return Loader(data, seed=5, data_rank=rank, data_size=ranks, batch_size=batch, accumulation=accumulation, **kwargs)


def global_steps(size, steps, ranks=1, **kwargs):
    """The samples of the global batch of each step, in the order of positions, and the position reached."""
    per_rank = []
    for rank in range(ranks):
        with make(size, rank, ranks, **kwargs) as loader:
            per_rank.append([loader.next().sample_ids for _ in range(steps)])
            position = loader.samples_seen
    ids = [np.stack(parts, axis=1).ravel() for parts in zip(*per_rank, strict=True)]
    return [step[step >= 0].tolist() for step in ids], position


def flat(steps):
    return list(chain.from_iterable(steps))


def test_batch():
    """A batch has its shape, its samples at their places, and counts what is valid in each micro-batch."""
    with make(40, rank=1, ranks=2, batch=3, accumulation=2) as loader:
        batch = loader.next()

    assert batch.inputs.shape == batch.targets.shape == (2, 3, Numbers.seq_length)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs[:, :, 0].tolist() == batch.sample_ids.tolist()
    assert (batch.valid_by_micro_batch, batch.valid_tokens) == ((9, 9), 18)
    assert (batch.samples, batch.epoch) == (12, 0)


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 60),
    ranks=st.integers(1, 4),
    batch=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    start=st.integers(0, 200),
    data=st.data(),
)
def test_rule(size, ranks, batch, accumulation, start, data):
    """Ids follow the documented rule, as a plain loop states it, from any position on and over the end of epochs."""
    rank = data.draw(st.integers(0, ranks - 1))
    position, total = start, ranks * batch * accumulation
    with make(size, rank, ranks, batch, accumulation, samples_seen=start) as loader:
        for _ in range(6):
            epoch, offset = divmod(position, size)
            order = EpochOrder(size, 5).indices(epoch, np.arange(size)).tolist()
            expected = [
                [
                    order[place] if place < size else -1
                    for j in range(batch)
                    for place in [offset + (m * ranks + rank) * batch + j]
                ]
                for m in range(accumulation)
            ]
            step = loader.next()
            assert step.sample_ids.tolist() == expected
            assert (step.epoch, step.samples) == (epoch, min(total, size - offset))
            real = torch.from_numpy(step.sample_ids >= 0)
            assert (step.targets[~real] == IGNORE_LABEL).all()
            assert step.targets[real][:, 0].tolist() == step.sample_ids[step.sample_ids >= 0].tolist()
            assert step.valid_tokens == Numbers.seq_length * int(real.sum())
            position += step.samples
            assert loader.samples_seen == position


@pytest.mark.parametrize(("ranks", "batch", "accumulation"), [(1, 12, 1), (4, 3, 1), (2, 3, 2), (3, 1, 4), (1, 1, 12)])
def test_same_global_batch_however_split(ranks, batch, accumulation):
    """The samples of a step and their order do not depend on world size and accumulation, over several epochs."""
    assert global_steps(50, 12, ranks, batch=batch, accumulation=accumulation) == global_steps(50, 12, 1, batch=12)


def test_ragged_last_step():
    """FR-02: the last, partial window of an epoch is a step of its own, counted by what is really in it."""
    batches = []
    for rank in range(2):
        with make(20, rank, 2, batch=1, accumulation=4) as loader:
            batches.append([loader.next() for _ in range(4)])

    assert [step.samples for step in batches[0]] == [8, 8, 4, 8]
    assert [step.epoch for step in batches[0]] == [0, 0, 0, 1]
    assert [[step.valid_by_micro_batch for step in steps][2] for steps in batches] == [(3, 3, 0, 0), (3, 3, 0, 0)]


def test_smaller_than_the_global_batch():
    """A data set smaller than one global batch is one step an epoch; some ranks have nothing but padding."""
    with make(3, rank=3, ranks=4, batch=2) as loader:
        steps = [loader.next() for _ in range(3)]

    assert [(step.epoch, step.samples, step.valid_tokens) for step in steps] == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]


@pytest.mark.parametrize("saved", [2, 5, 7])
def test_resume_around_the_end_of_an_epoch(saved):
    """FR-14: 5 steps an epoch; resuming after 2, 5 (its end) and 7 continues each rank's ids exactly."""
    for rank in range(2):
        with make(20, rank, 2, accumulation=2) as loader:
            steps = [loader.next() for _ in range(saved)]
            position = loader.samples_seen
            steps += [loader.next() for _ in range(10 - saved)]
        with make(20, rank, 2, accumulation=2, samples_seen=position) as resumed:
            after = [resumed.next() for _ in range(10 - saved)]

        assert position == 4 * saved
        assert [s.sample_ids.tolist() for s in after] == [s.sample_ids.tolist() for s in steps[saved:]]
        assert [s.epoch for s in after] == [step // 5 for step in range(saved, 10)]
    everything, _ = global_steps(20, 10, 2, accumulation=2)
    first, second = flat(everything[:5]), flat(everything[5:])
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_position_is_what_was_consumed(prefetch):
    """FR-16: what was made ahead or looked at does not move the position; prefetching may change on resume."""
    everything, _ = global_steps(40, 10, 2, batch=2)
    with make(40, 0, 2, batch=2, prefetch=prefetch) as loader:
        assert loader.samples_seen == 0
        for _ in range(3):
            loader.next()
        ahead = loader.peek()
        assert loader.samples_seen == 12
        assert loader.peek() is ahead
        assert loader.next() is ahead
        assert loader.samples_seen == 16

    assert everything[3:] == global_steps(40, 7, 2, batch=2, prefetch=5 - prefetch, samples_seen=12)[0]


def test_world_size_changes():
    """FR-17: 4 ranks, then 2, then 3 see together what one world size would have, each sample once."""
    everything, _ = global_steps(48, 4, batch=12)
    first, position = global_steps(48, 2, 4, batch=3)
    second, position = global_steps(48, 1, 2, batch=3, accumulation=2, samples_seen=position)
    third, position = global_steps(48, 1, 3, batch=4, samples_seen=position)

    assert first + second + third == everything
    assert sorted(flat(everything)) == list(range(48))
    assert position == 48


def test_global_batch_changes():
    """FR-17: a global batch of another size goes on from the same position."""
    everything = flat(global_steps(48, 4, batch=12)[0])
    before, position = global_steps(48, 2, batch=12)
    after, _ = global_steps(48, 3, 2, batch=5, samples_seen=position)

    assert flat(before + after) == everything
    assert [len(step) for step in after] == [10, 10, 4]


def test_endless():
    """An endless data set is read in its own order, in one epoch, from any position."""
    steps, position = global_steps(SyntheticDataset(0, 16, 4), 3, 2, batch=2, samples_seen=1000)

    assert steps == [[1000, 1001, 1002, 1003], [1004, 1005, 1006, 1007], [1008, 1009, 1010, 1011]]
    assert position == 1012


@pytest.mark.parametrize("seq_length", [5, 5000])
def test_short_last_sample(seq_length):
    """Of a text, every token but the first is a target once an epoch, fetched many steps or one at a time."""
    tokens = np.arange(1, 23457, dtype=np.uint16)
    data = TokenDataset(tokens, 30000, seq_length, origin="The test")
    targets = []
    with make(data, batch=4) as loader:
        while (step := loader.next()).epoch == 0:
            targets.append(step.targets[step.targets != IGNORE_LABEL])
            assert step.valid_tokens == len(targets[-1])

    assert sorted(torch.cat(targets).tolist()) == tokens[1:].tolist()


class Failing(Numbers):
    def fetch(self, indices):
        if 7 in indices:
            raise OSError(5, "the disk is gone")
        return super().fetch(indices)


def test_error_surfaces():
    """What the data set raises in the background is raised by next(), as itself, and again when asked again."""
    with make(Failing(8), batch=8) as loader:
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                loader.next()
        assert loader.samples_seen == 0


def test_close():
    """Closing ends the thread, whatever it was waiting for; it may be repeated; then there is nothing to be had."""
    threads = set(threading.enumerate())
    loaders = [make(10_000, batch=64, prefetch=prefetch) for prefetch in (1, 3)]
    loaders[0].next()
    for loader in loaders:
        loader.close()
        loader.close()
        with pytest.raises(RuntimeError, match="closed"):
            loader.next()

    assert set(threading.enumerate()) == threads


def test_refused():
    """A data set without samples is refused, and so is no prefetching at all."""
    with pytest.raises(ConfigError, match=r"Numbers has 0 samples"):
        make(0)
    with pytest.raises(ValueError, match="prefetch must be at least 1, got 0"):
        make(5, prefetch=0)
