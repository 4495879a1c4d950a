"""Options of the guards are checked before any rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtb_core import ConfigError, RunPluginInfo, TrainConfig, describe_options, run
from mtb_guards.options import seconds
from mtb_guards.plugin import mtb_run_plugins


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("90s", 90),
        ("2h30m", 9000),
        ("1d", 86400),
        ("1d2h3m4s", 93784),
        ("5m", 300),
        ("1h30", 3630),
        ("0", 0),
    ],
)
def test_durations(text: str, expected: float) -> None:
    """Days, hours, minutes and seconds, in this order, or seconds alone."""
    assert seconds(text, "x") == expected


@pytest.mark.parametrize("text", ["", "h", "2h30x", "30m2h", "-5", "1.5h", "two hours"])
def test_other_durations_are_refused(text: str) -> None:
    """The message names the option, the value and what is valid."""
    with pytest.raises(ConfigError, match=r"wall-time.limit is .*; it must be a duration like 2h30m"):
        seconds(text, "wall-time.limit")


def test_every_guard_is_off_by_default() -> None:
    """None takes part without an option of its own; each has one."""
    for info in mtb_run_plugins():
        assert isinstance(info, RunPluginInfo)
        assert info.always is None
        assert describe_options(info.options)


EVAL = {"eval_data": "synthetic", "eval_batches": 1}


@pytest.mark.parametrize(
    ("guards", "settings", "text"),
    [
        ({"early-stop.watch": "train"}, {}, "would never end the run; set early-stop.patience or early-stop.target"),
        ({"early-stop.patience": 2}, EVAL, "give --eval-data and --eval-every, or set early-stop.watch=train"),
        ({"wall-time.margin": "5"}, {}, "needs a limit: set wall-time.limit"),
        ({"wall-time.limit": "1x"}, {}, "wall-time.limit is '1x'"),
        ({"wall-time.limit": "1m", "wall-time.margin": "60"}, {}, "would stop at once: its limit is 60 s"),
        ({"best.folder": "best"}, {"checkpoint_dir": "c"}, "give --checkpoint-dir and --eval-data"),
        ({"best.folder": "best"}, EVAL, "give --checkpoint-dir and --eval-data"),
        ({"best.folder": "../best"}, {"checkpoint_dir": "c", **EVAL}, "must be a plain name"),
        ({"best.folder": "step_00000001"}, {"checkpoint_dir": "c", **EVAL}, "must be a plain name"),
        ({"loss-spike.factor": 3}, {}, "give --checkpoint-dir and --save-every, or set loss-spike.action=skip"),
        ({"loss-spike.factor": 0.5}, {}, "must be at least 1"),
        ({"ema.decay": 1.5}, {}, "must be from 0.0 to 1.0"),
        ({"ema.rate": 1}, {}, "has no option 'rate'"),
    ],
)
def test_what_cannot_be_is_refused(
    guards: dict[str, Any], settings: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to change, and no run is begun."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        run(TrainConfig(steps=1, device="cpu", plugin_opt=guards, **settings), quiet=True)
    assert text in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_best_checkpoint_of_another_run_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """A new run does not begin where the folder of its best checkpoint is there already."""
    (tmp_path / "c" / "best").mkdir(parents=True)
    settings = {"checkpoint_dir": str(tmp_path / "c"), **EVAL}
    with pytest.raises(ConfigError, match="holds the best checkpoint of another run"):
        run(TrainConfig(steps=1, device="cpu", plugin_opt={"best.folder": "best"}, **settings), quiet=True)
