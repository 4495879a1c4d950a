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


def test_saves_of_another_run_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that another one has overtaken, from its plan to its start, does not begin anew beside its checkpoints."""
    make = running.make_run_folder

    def late(planned: Any) -> Path:
        monkeypatch.setattr(running, "make_run_folder", make)
        other = tmp_path / "other"
        run(attrs.evolve(config(tmp_path), run_dir=str(other)), quiet=True)
        return make(planned)

    monkeypatch.setattr(running, "make_run_folder", late)
    with pytest.raises(ConfigError, match="has saved there while this one began"):
        run(config(tmp_path, resume="auto"), quiet=True)


def test_folders_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no locks does not keep anybody from training."""

    def fail(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", fail)
    with exclusive(tmp_path, "--run-dir"), exclusive(tmp_path, "--run-dir"):
        pass
