"""Tests of mtb_core.ckpt.resume."""

import pytest

from mtb_core.api.errors import ConfigError
from mtb_core.ckpt.resume import check_config, check_schedule
from mtb_core.config import TrainConfig
from mtb_core.config.toml import config_values


def test_equal_configurations():
    """The same settings, and others that do not decide the training, may go on."""
    saved = config_values(TrainConfig(seed=3))
    assert check_config(saved, config_values(TrainConfig(seed=3, steps=7, nproc=2)), []) == {}


def test_table_of_differences():
    """All differing settings are listed with both values."""
    with pytest.raises(ConfigError) as caught:
        check_config(config_values(TrainConfig()), config_values(TrainConfig(seed=1, learning_rate=0.5)), [])
    assert "--seed           saved 0, now 1" in str(caught.value)
    assert "--learning-rate  saved 0.001, now 0.5" in str(caught.value)


def test_let_through():
    """A named setting is let through and recorded; the others still count."""
    saved = config_values(TrainConfig())
    changes = check_config(saved, config_values(TrainConfig(learning_rate=0.5)), ["learning-rate"])
    assert changes == {"learning_rate": {"saved": 0.001, "now": 0.5}}
    with pytest.raises(ConfigError, match="--seed  saved 0, now 1"):
        check_config(saved, config_values(TrainConfig(learning_rate=0.5, seed=1)), ["learning_rate"])


@pytest.mark.parametrize("name", ["learningrate", "steps"])
def test_unknown_names(name):
    """A name that is no setting, or one that decides nothing, is refused."""
    with pytest.raises(ConfigError, match=f"--allow-config-change {name}"):
        check_config(config_values(TrainConfig()), config_values(TrainConfig()), [name])


def test_schedule():
    """FR-13: the schedule has completed exactly the global step; an old constant one is rebuilt, others are refused."""
    assert check_schedule({"completed_steps": 4}, 4, TrainConfig())["completed_steps"] == 4
    with pytest.raises(ConfigError, match="has completed 3 steps, but its global step is 4"):
        check_schedule({"completed_steps": 3}, 4, TrainConfig())
    assert check_schedule(None, 4, TrainConfig()) == {"completed_steps": 4}
    with pytest.raises(ConfigError, match="--lr-scheduler cosine cannot be rebuilt"):
        check_schedule(None, 4, TrainConfig(lr_scheduler="cosine"))


def test_settings_that_are_newer_than_the_checkpoint():
    """A setting that the checkpoint's configuration has not had its default then: that goes on, another value does not."""
    saved = config_values(TrainConfig())
    del saved["weight_decay"]
    assert check_config(saved, config_values(TrainConfig()), []) == {}
    with pytest.raises(ConfigError, match=r"--weight-decay  saved 0\.1, now 0\.5"):
        check_config(saved, config_values(TrainConfig(weight_decay=0.5)), [])
