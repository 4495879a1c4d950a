"""Batches for evaluation."""

from types import SimpleNamespace

import pytest
import torch

from mtb_core import ConfigError, EvaluationWork, Loss, Strategy
from mtb_core.config import IGNORE_LABEL
from mtb_core.data.evaluation import eval_batches
from mtb_core.data.synthetic import SyntheticDataset

from .data_numbers import Numbers


def seen(size, ranks, batch_size, batches=0):
    """Per rank, per batch: the samples that count."""
    return [
        [
            targets[:, 0][targets[:, 0] != IGNORE_LABEL].tolist()
            for _, targets, _ in eval_batches(
                Numbers(size), data_rank=rank, data_size=ranks, batch_size=batch_size, batches=batches
            )
        ]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 5, 20])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("size", [9, 3, 8])
def test_every_sample_once(size, ranks, batch_size):
    """FR-39: every sample counts once, in the data's order, and all ranks have the same number of batches."""
    per_rank = seen(size, ranks, batch_size)
    in_order = [sample for batches in zip(*per_rank, strict=True) for batch in batches for sample in batch]

    assert in_order == list(range(size))
    assert len({len(batches) for batches in per_rank}) == 1
    assert sum(in_order) / len(in_order) == (size - 1) / 2


def test_shapes():
    """All batches have the same shape; missing samples are ignored everywhere."""
    batches = list(eval_batches(Numbers(3), data_rank=3, data_size=4, batch_size=2))

    assert len(batches) == 1
    inputs, targets, real = batches[0]
    assert real == 0
    assert inputs.shape == targets.shape == (2, Numbers.seq_length)
    assert inputs.dtype == targets.dtype == torch.int64
    assert (targets == IGNORE_LABEL).all()


def test_limited():
    """A number of batches limits what each rank sees, and never goes beyond the data."""
    assert seen(9, 2, 2, batches=1) == [[[0, 1]], [[2, 3]]]
    assert seen(9, 2, 2, batches=50) == seen(9, 2, 2)


def test_endless():
    """Endless data needs a number of batches, at once and not at the first batch."""
    data = SyntheticDataset(0, 16, 4)
    with pytest.raises(ConfigError, match=r"--eval-batches is 0.*endless"):
        eval_batches(data, data_rank=0, data_size=1, batch_size=2)
    batches = list(eval_batches(data, data_rank=1, data_size=2, batch_size=3, batches=2))
    assert len(batches) == 2
    assert not any((targets == IGNORE_LABEL).any() for _, targets, _ in batches)


def test_losses_are_added_up_in_float64():
    """Small losses after a large one are not lost, as in fp32 they would be."""
    losses = iter([2.0**24, 1.0, 1.0])
    batches = iter([(torch.zeros(1, 1), torch.zeros(1, 1), 1)] * 3)
    work = EvaluationWork(batches, lambda *_: Loss(torch.tensor(next(losses))), lambda *_: None)
    assert float(Strategy().evaluate(SimpleNamespace(module=None), work).sum) == 2.0**24 + 2
