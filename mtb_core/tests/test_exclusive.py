"""Tests of mtb_core.train.exclusive: two live runs never write into one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from mtb_core import ConfigError, TrainConfig, run, running
from mtb_core.train import exclusive as module
from mtb_core.train.exclusive import LOCK, exclusive

TINY: dict[str, Any] = {"seq_length": 8, "d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 64, "batch_size": 2}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.0)


def config(folder: Path, **settings: Any) -> TrainConfig:
    settings = {"steps": 1, "warmup_steps": 0, "device": "cpu", "sink": (), "save_every": 1, **TINY, **settings}
    return TrainConfig(checkpoint_dir=str(folder / "saved"), run_dir=str(folder / "run"), **settings)


@pytest.mark.parametrize(("place", "option"), [("saved", "--checkpoint-dir"), ("run", "--run-dir")])
def test_a_folder_in_use_is_refused(tmp_path: Path, place: str, option: str) -> None:
    """Before any rank starts; when the other run has ended, the folder is free again."""
    with (
        exclusive(tmp_path / place, "--x"),
        pytest.raises(ConfigError, match=f"{option} .*another run uses this folder"),
    ):
        run(config(tmp_path, nproc=2, strategy="ddp", resume="auto"), quiet=True)
    assert not list((tmp_path / "saved").glob("step_*"))
    assert run(config(tmp_path, resume="auto"), quiet=True).exit_reason == "done"
    assert (tmp_path / place / LOCK).is_file()


def test_a_refused_run_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``--run-dir`` each run makes a folder of its own, and one that may not start makes none."""
    monkeypatch.chdir(tmp_path)
    with exclusive(tmp_path / "saved", "--x"), pytest.raises(ConfigError, match="another run uses this folder"):
        run(attrs.evolve(config(tmp_path), run_dir=None), quiet=True)
    assert not (tmp_path / "runs").exists()


def test_saves_of_another_run_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that another one has overtaken, from its plan to its start, does not begin anew beside its checkpoints."""
    check = running.check_network

    def meanwhile(planned: TrainConfig) -> None:
        monkeypatch.setattr(running, "check_network", check)
        run(attrs.evolve(planned, run_dir=str(tmp_path / "other"), resume=None), quiet=True)

    monkeypatch.setattr(running, "check_network", meanwhile)
    with pytest.raises(ConfigError, match="has saved there while this one began"):
        run(config(tmp_path, resume="auto"), quiet=True)


def test_oddities_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run looks at its folder of checkpoints several times, and says what is odd there when it chooses from it."""
    run(config(tmp_path, until_step=2, steps=None), quiet=True)
    (tmp_path / "saved" / "step_00000002" / "manifest.json").unlink()
    caplog.clear()
    run(config(tmp_path, resume="auto"), quiet=True)
    told = [record.getMessage() for record in caplog.records]
    assert sum("missing or incomplete" in text for text in told) == 1
    assert sum("some checkpoints cannot be used (step_00000002" in text for text in told) == 1


def test_folders_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no locks does not keep anybody from training."""

    def fail(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", fail)
    with exclusive(tmp_path, "--run-dir"), exclusive(tmp_path, "--run-dir"):
        pass
