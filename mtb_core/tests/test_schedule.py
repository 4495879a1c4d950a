"""Learning-rate schedules."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mtb_core import TrainConfig
from mtb_core.train import schedule
from mtb_core.train.schedule import LearningRate


def learning_rate(config, step):
    return getattr(schedule, config.lr_scheduler)(config)(step)


COSINE = TrainConfig(
    lr_scheduler="cosine", learning_rate=1.0, min_learning_rate=0.1, lr_warmup_steps=4, lr_decay_steps=12
)


def test_constant():
    """The rate never changes."""
    config = TrainConfig(learning_rate=0.03)
    assert {learning_rate(config, step) for step in (0, 1, 5, 10**9)} == {0.03}


def test_cosine_exact_values():
    """Warm-up starts at rate / W and reaches the rate in its last step; the cosine's ends and middle are exact."""
    assert [learning_rate(COSINE, s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(COSINE, 4) == 1.0
    assert learning_rate(COSINE, 6) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, rel=1e-15)
    assert learning_rate(COSINE, 8) == pytest.approx(0.55, rel=1e-15)
    assert learning_rate(COSINE, 12) == learning_rate(COSINE, 10**6) == 0.1


def test_cosine_without_warm_up_starts_at_the_rate():
    """The first step has the full rate where there is no warm-up."""
    config = TrainConfig(lr_scheduler="cosine", learning_rate=0.5, lr_decay_steps=1)
    assert [learning_rate(config, s) for s in range(3)] == [0.5, 0.0, 0.0]


def test_unresolved_configuration_is_refused():
    """The end of the cosine must have been decided."""
    with pytest.raises(ValueError, match="resolved"):
        learning_rate(TrainConfig(lr_scheduler="cosine"), 0)


@given(
    warmup=st.integers(0, 30),
    length=st.integers(1, 50),
    rate=st.floats(1e-6, 10),
    share=st.floats(0, 1),
    step=st.integers(0, 100),
)
def test_cosine_is_between_its_bounds_and_falls(warmup, length, rate, share, step):
    """After warm-up the rate never rises and stays between minimum and peak; in warm-up it never falls."""
    config = TrainConfig(
        lr_scheduler="cosine",
        learning_rate=rate,
        min_learning_rate=rate * share,
        lr_warmup_steps=warmup,
        lr_decay_steps=warmup + length,
    )
    now, following = learning_rate(config, step), learning_rate(config, step + 1)
    assert 0 < now <= rate * (1 + 1e-12) or now == rate * share == 0
    if step + 1 < warmup:
        assert following > now
    elif step >= warmup:
        assert rate * share * (1 - 1e-12) <= following <= now * (1 + 1e-12)


def two_groups():
    groups = [{"params": nn.Linear(1, 1).parameters(), "lr": r, "initial_lr": r} for r in (1.0, 0.25)]
    return torch.optim.SGD(groups, lr=1.0)


def rates(optimizer, steps):
    rate = LearningRate(COSINE.learning_rate, schedule.cosine(COSINE), optimizer)
    out = []
    for step in steps:
        first = rate.set(step)
        out.append([group["lr"] for group in optimizer.param_groups])
        assert first == out[-1][0]
    return out


def test_groups_with_other_base_rates_follow_the_same_curve():
    """Each group's rate is the curve times its base, exactly the configured one where the base is the configured."""
    for step, (first, second) in enumerate(rates(two_groups(), range(15))):
        assert first == learning_rate(COSINE, step)
        assert second == pytest.approx(0.25 * first, rel=1e-15)


@pytest.mark.parametrize("start", [3, 4])
def test_continuing_gives_the_uninterrupted_list(start):
    """The rate is a function of the completed steps alone: a new optimizer continues the list exactly."""
    whole = rates(two_groups(), range(10))
    assert rates(two_groups(), range(start, 10)) == whole[start:]
