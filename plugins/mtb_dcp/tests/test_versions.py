"""Checkpoints of formats 1 to 3, kept as bytes beside this file: read, resumed, verified, compared, exported."""

import io
import json
import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mtb_checkpoint import compare_checkpoints, export_safetensors, verify_checkpoint
from mtb_core import RunFailed, TrainConfig, run
from mtb_core.ckpt import CheckpointManager, DamagedCheckpoint
from mtb_core.ckpt.catalog import find
from mtb_core.ckpt.opened import open_checkpoint, read_rng

from .training import Training, draw

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
    assert training.weights() == expected
    assert training.state().pieces["optim/0.weight/step"][0].tensor.item() == 3


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
    drawn = draw()
    for seed_stream in (torch.manual_seed, np.random.seed, random.seed):
        seed_stream(7)
    assert drawn == draw()


def test_version_2_without_random_state(old, caplog):
    """Where format 2 lacks its random state, resuming fails unless that is allowed, with a warning."""
    path, manager = old(2), CheckpointManager("unused")
    (path / "rng_state_rank_00000.pt").unlink()
    with pytest.raises(RunFailed, match=r"rng_state_rank_00000\.pt: it is missing.*--allow-missing-rng"):
        manager.load(path, Training().state())
    loaded = manager.load(path, Training().state(), allow_missing_rng=True)
    assert loaded.deterministic is False
    assert "Going on without it" in caplog.text


def test_verify(old):
    """FR-26: a checkpoint without digests does not verify."""
    assert not verify_checkpoint(old(1)).ok


def test_missing_on_both_sides(old):
    """Random state and schedule that are missing on both sides are no match: the older format against itself."""
    checkpoint = open_checkpoint(old(1))
    result = compare_checkpoints(checkpoint, checkpoint)
    assert result["sections"]["model"]["exact"]
    assert not result["exact_match"]
    assert not result["sections"]["rng"]["exact"]
    assert result["sections"]["scheduler"]["reason"] == "it is missing on both sides"
    assert result["left_deterministic"] is False


@pytest.fixture
def third(tmp_path):
    """A copy of the checkpoint of format 3, of two ranks."""
    shutil.copytree(DATA / "v3", tmp_path / "c")
    return tmp_path / "c" / "step_00000003"


def test_format_3(third, tmp_path):
    """Format 3 verifies, loads to the bit, compares as the same with what is saved of it now, and is exported."""
    assert verify_checkpoint(third).ok
    training, manager = Training(seed=9), CheckpointManager(tmp_path / "now", asynchronous=False)
    loaded = training.load(manager, third)
    assert (loaded.version, loaded.step, loaded.values["samples_seen"]) == (3, 3, 12)
    assert training.weights() == json.loads((third.parent / "weights.json").read_text())
    manager.preflight()
    manager.save(3, training.state(), sections=loaded.sections)
    now = open_checkpoint(tmp_path / "now" / "step_00000003")
    assert (now.version, now.values["storage"]) == (4, "safetensors")
    result = compare_checkpoints(open_checkpoint(third), now)
    assert [name for name, section in result["sections"].items() if not section["exact"]] == ["rng"]
    [weights] = export_safetensors(open_checkpoint(third), tmp_path / "w.safetensors")
    assert {name: t.tolist() for name, t in load_file(weights).items()} == training.weights()


def test_a_run_of_format_3_goes_on(tmp_path):
    """``mtb train --resume`` takes a checkpoint of format 3 and continues deterministically, as the run did then."""
    shutil.copytree(DATA / "v3run", tmp_path / "c")
    settings = {"dropout": 0.2, "lr_scheduler": "cosine", "lr_decay_steps": 6, "max_grad_norm": 0.5, "device": "cpu"}
    sizes = {"seq_length": 8, "vocab_size": 32, "d_model": 8, "n_heads": 2, "n_layers": 1, "batch_size": 2}
    config = TrainConfig(
        strategy="single",
        **settings,
        **sizes,
        warmup_steps=0,
        until_step=6,
        checkpoint_dir=str(tmp_path / "c"),
        resume="auto",
        run_dir=str(tmp_path / "run"),
        sink=("jsonl",),
    )
    result = run(config, quiet=True)
    assert result.exit_reason == "done", result.failure
    assert (result.runtime["resumed"], result.runtime["resume_deterministic"]) == (True, True)
    lines = (tmp_path / "run" / "metrics" / "rank_00000.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses == pytest.approx([3.471987724304199, 3.485276699066162, 3.5185043811798096, 3.459958791732788])


class Seals:
    """Makes manifest and READY fit what was changed."""

    def __init__(self, path):
        self.path = path

    def __call__(self, name, data):
        (self.path / name).write_bytes(data)
        manifest = json.loads((self.path / "manifest.json").read_text())
        manifest["files"][name] = {"size": len(data), "digest": xxhash.xxh3_128_hexdigest(data)}
        text = json.dumps(manifest).encode()
        (self.path / "manifest.json").write_bytes(text)
        (self.path / "READY").write_text(f"manifest.json xxh3_128:{xxhash.xxh3_128_hexdigest(text)}\n")


def test_bytes_entries_are_refused(third):
    """An index with entries that need unpickling, however well sealed, is refused by verify and resume."""
    metadata = pickle.loads((third / ".metadata").read_bytes())
    metadata.state_dict_metadata["evil"] = BytesStorageMetadata()
    Seals(third)(".metadata", pickle.dumps(metadata))
    [problem] = verify_checkpoint(third).problems
    assert (problem.file, problem.problem) == (".metadata", "it has entries that are not tensors: evil")
    with pytest.raises(RunFailed, match="entries that are not tensors: evil"):
        CheckpointManager(third.parent).load(third, Training().state())


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
def test_damage(third, name):
    """A flipped bit in a file of format 3 is found by verify, and not resumed from."""
    data = bytearray((third / name).read_bytes())
    data[len(data) // 2] ^= 1
    (third / name).write_bytes(data)
    assert name in [problem.file for problem in verify_checkpoint(third).problems]
    with pytest.raises(RunFailed, match="the digest differs"):
        CheckpointManager(third.parent).load(third, Training().state())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_written_now(tmp_path):
    """``format_name="dcp"`` writes what ``dcp.load`` reads, verifies, and says so in manifest and README."""
    training, manager = Training(), CheckpointManager(tmp_path, asynchronous=False, format_name="dcp")
    manager.preflight(training.state())
    manager.save(1, training.state())
    path = tmp_path / "step_00000001"
    assert verify_checkpoint(path).ok
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["storage"], manifest["storage_distribution"]) == ("dcp", "mtb-dcp")
    assert "torch.distributed.checkpoint" in (path / "README.md").read_text()
    out = {key: torch.zeros_like(pieces[0].tensor) for key, pieces in training.state().pieces.items()}
    dcp.load(out, checkpoint_id=path)
    assert all(torch.equal(out[key], pieces[0].tensor) for key, pieces in training.state().pieces.items())
    other = Training(seed=9)
    other.load(manager, path)
    assert other.weights() == training.weights()


class Runs:
    def __reduce__(self):
        return (os.mkdir, ("ran",))


@pytest.mark.parametrize("kind", ["pickle", "torch", "list", "compressed"])
def test_hostile_random_state(old, kind, tmp_path, monkeypatch):
    """The random state of format 2 cannot run code."""
    monkeypatch.chdir(tmp_path)
    path = old(2)
    if kind == "pickle":
        content = pickle.dumps(Runs())
    elif kind == "compressed":  # all is well but for a member that would become large
        with zipfile.ZipFile(path / "rng_state_rank_00000.pt", "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("more", bytes(1 << 26))
        content = (path / "rng_state_rank_00000.pt").read_bytes()
    else:
        file = io.BytesIO()
        torch.save(Runs() if kind == "torch" else [1, 2], file)
        content = file.getvalue()
    (path / "rng_state_rank_00000.pt").write_bytes(content)
    reason = r"\(ValueError\)" if kind == "compressed" else ""
    with pytest.raises(DamagedCheckpoint, match=f"cannot be read {reason}"):
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
