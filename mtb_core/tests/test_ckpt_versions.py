"""Tests of mtb_core.ckpt.versions: checkpoints of the older formats, kept as bytes beside this file."""

import io
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from mtb_core.api.errors import RunFailed
from mtb_core.ckpt.catalog import find
from mtb_core.ckpt.layout import DamagedCheckpoint
from mtb_core.ckpt.manager import CheckpointManager
from mtb_core.ckpt.opened import open_checkpoint, read_rng

from .ckpt_ranks import Training

DATA = Path(__file__).parent / "data" / "checkpoints"


@pytest.fixture
def old(tmp_path):
    """``old(version)``: a copy of the checkpoint of that format."""

    def copy(version):
        shutil.copytree(DATA / f"v{version}", tmp_path / "c")
        return tmp_path / "c" / "step_00000003"

    return copy


@pytest.mark.parametrize("version", [1, 2])
def test_weights_and_moments(old, version):
    """Weights and optimizer state of both older formats load to the bit."""
    path, training = old(version), Training(seed=9)
    loaded = training.load(CheckpointManager(path.parent), find(path.parent, "auto"))
    assert (loaded.step, loaded.version, loaded.values["samples_seen"]) == (3, version, 12)
    expected = json.loads((path.parent / "weights.json").read_text())
    assert {n: p.tolist() for n, p in training.model.named_parameters()} == expected
    assert training.copy()["optim/0.weight/step"][0].item() == 3


def test_version_1(old):
    """Format 1 has no random state, so the continuation is not deterministic; it synchronised at every micro-batch."""
    path = old(1)
    loaded = CheckpointManager(path.parent).load(path, Training().state())
    assert (loaded.deterministic, loaded.rng) == (False, None)
    assert loaded.determinism_reason == "checkpoints of format 1 hold no random state"
    assert loaded.values["gradient_sync_mode"] == "every"
    assert loaded.sections["scheduler"] is None


def test_version_2_random_state(old):
    """Format 2's random state of every generator comes back."""
    path = old(2)
    Training().load(CheckpointManager(path.parent), path)
    drawn = (torch.rand(1), np.random.rand(), random.random())
    for seed_stream in (torch.manual_seed, np.random.seed, random.seed):
        seed_stream(7)
    assert drawn == (torch.rand(1), np.random.rand(), random.random())


def test_version_2_without_random_state(old, caplog):
    """Where format 2 lacks its random state, resuming fails unless that is allowed, with a warning."""
    path, manager = old(2), CheckpointManager("unused")
    (path / "rng_state_rank_00000.pt").unlink()
    with pytest.raises(RunFailed, match=r"rng_state_rank_00000\.pt: it is missing.*--allow-missing-rng"):
        manager.load(path, Training().state())
    loaded = manager.load(path, Training().state(), allow_missing_rng=True)
    assert loaded.deterministic is False
    assert "Going on without it" in caplog.text


class Runs:
    def __reduce__(self):
        return (os.mkdir, ("ran",))


@pytest.mark.parametrize("kind", ["pickle", "torch", "list"])
def test_hostile_random_state(old, kind, tmp_path, monkeypatch):
    """The random state of format 2 cannot run code."""
    monkeypatch.chdir(tmp_path)
    path = old(2)
    if kind == "pickle":
        content = pickle.dumps(Runs())
    else:
        file = io.BytesIO()
        torch.save(Runs() if kind == "torch" else [1, 2], file)
        content = file.getvalue()
    (path / "rng_state_rank_00000.pt").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        read_rng(open_checkpoint(path), 0)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format_version": 7}, "format version is 7"),
        ({"global_step": "3"}, "global_step"),
        ({"world_size": None}, "world"),
    ],
)
def test_bad_metadata(old, change, problem):
    """A ``metadata.json`` that is not of these formats is refused."""
    path = old(1)
    values = json.loads((path / "metadata.json").read_text()) | change
    (path / "metadata.json").write_text(json.dumps(values))
    with pytest.raises(DamagedCheckpoint, match=problem):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format_version", [1]),
        ("format_version", True),
        ("format_version", None),
        ("global_step", -3),
        ("global_step", 4),
        ("world_size", 0),
        ("samples_seen", "12"),
        ("tokens_seen", -1),
    ],
)
def test_values_that_cannot_be(old, key, value):
    """A value of another type, a negative one, or the step of another folder is a damaged checkpoint."""
    path = old(1)
    values = json.loads((path / "metadata.json").read_text())
    (path / "metadata.json").write_text(json.dumps({**values, key: value}))
    with pytest.raises(DamagedCheckpoint, match=r"metadata\.json"):
        open_checkpoint(path)
