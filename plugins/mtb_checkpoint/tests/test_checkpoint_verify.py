"""Tests of mtb_checkpoint.verify and of what resuming refuses: FR-26, each defect on a copy of a good checkpoint."""

import os
import shutil

import pytest

from mtb_checkpoint import verify_checkpoint
from mtb_core.api.errors import RunFailed
from mtb_core.ckpt import files
from mtb_core.ckpt.catalog import is_ready
from mtb_core.ckpt.layout import DamagedCheckpoint
from mtb_core.ckpt.manager import CheckpointManager
from mtb_core.ckpt.manifest import ready_text
from mtb_core.ckpt.opened import open_checkpoint
from mtb_core.tests.ckpt_ranks import Training, edit, resealed, run_ranks


def two_ranks(rank, folder):
    training = Training(rank)
    with CheckpointManager(folder) as manager:
        manager.preflight()
        training.step()
        training.save(manager)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("good")
    run_ranks(2, two_ranks, folder)
    return folder / "step_00000001"


@pytest.fixture
def copy(good, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(good, tmp_path / good.name)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def append(path):
    path.write_bytes(path.read_bytes() + b"x")


def restated(path, change):
    """Edit ``state.json``, and make the manifest and READY fit."""
    edit(path / "state.json", change)
    data = (path / "state.json").read_bytes()
    resealed(path, lambda m: m["files"].update({"state.json": {"size": len(data), "digest": files.digest_bytes(data)}}))


def swap(path):
    one, other = path / "rng/rank_00000.json", path / "rng/rank_00001.json"
    assert one.stat().st_size == other.stat().st_size
    one.rename(path / "x")
    other.rename(one)
    (path / "x").rename(other)


def linked(path, name, target):
    (path / name).unlink()
    (path / name).symlink_to(target)


def folder_linked(path):
    shutil.copytree(path / "rng", path.parent / "elsewhere")
    shutil.rmtree(path / "rng")
    (path / "rng").symlink_to(path.parent / "elsewhere")


DEFECTS = {
    "flipped bit": ("rank_00000.safetensors", lambda p: flip(p / "rank_00000.safetensors")),
    "flipped bit of another rank": ("rank_00001.safetensors", lambda p: flip(p / "rank_00001.safetensors")),
    "truncated": (
        "rank_00001.safetensors",
        lambda p: os.truncate(p / "rank_00001.safetensors", (p / "rank_00001.safetensors").stat().st_size - 1),
    ),
    "appended": ("rank_00000.safetensors", lambda p: append(p / "rank_00000.safetensors")),
    "swapped": ("rng/rank_00000.json", swap),
    "missing": ("rank_00000.safetensors", lambda p: (p / "rank_00000.safetensors").unlink()),
    "missing index": ("index.json", lambda p: (p / "index.json").unlink()),
    "missing manifest": ("manifest.json", lambda p: (p / "manifest.json").unlink()),
    "missing READY": ("READY", lambda p: (p / "READY").unlink()),
    "empty READY": ("READY", lambda p: (p / "READY").write_text("")),
    "edited manifest": ("manifest.json", lambda p: edit(p / "manifest.json", lambda m: m.update(samples_seen=999))),
    "edited state": ("state.json", lambda p: edit(p / "state.json", lambda s: s["train_state"].update(global_step=9))),
    "a link to a copy": (
        "rank_00000.safetensors",
        lambda p: linked(p, "rank_00000.safetensors", shutil.copy(p / "rank_00000.safetensors", p.parent)),
    ),
    "a linked folder": ("rng/rank_00000.json", folder_linked),
    "forged: no digests": ("manifest.json", lambda p: resealed(p, lambda m: m.pop("files"))),
    "forged: a null digest": (
        "manifest.json",
        lambda p: resealed(p, lambda m: m["files"]["state.json"].update(digest=None)),
    ),
    "forged: a shard unlisted": (
        "rank_00001.safetensors",
        lambda p: resealed(p, lambda m: m["files"].pop("rank_00001.safetensors")),
    ),
    "forged: leaves the folder": (
        "manifest.json",
        lambda p: resealed(p, lambda m: m["files"].update({"../x": m["files"]["state.json"]})),
    ),
    "forged: another algorithm": ("manifest.json", lambda p: resealed(p, lambda m: m.update(digest_algorithm="none"))),
    "forged: newer format": ("manifest.json", lambda p: resealed(p, lambda m: m.update(format_version=5))),
    "forged: older than manifests": ("manifest.json", lambda p: resealed(p, lambda m: m.update(format_version=2))),
    "forged: huge world": ("manifest.json", lambda p: resealed(p, lambda m: m.update(world_size=10**12))),
    "forged: world beyond the files": (
        "manifest.json",
        lambda p: resealed(p, lambda m: m.update(world_size=(1 << 24) - 1)),
    ),
    "forged: negative step": ("manifest.json", lambda p: resealed(p, lambda m: m.update(step=-1))),
    "forged: no train state": ("state.json", lambda p: restated(p, lambda s: s.pop("train_state"))),
    "forged: listed train state": ("state.json", lambda p: restated(p, lambda s: s.update(train_state=[]))),
    "forged: negative samples": (
        "state.json",
        lambda p: restated(p, lambda s: s["train_state"].update(samples_seen=-4)),
    ),
    "forged: no samples": ("state.json", lambda p: restated(p, lambda s: s["train_state"].pop("samples_seen"))),
    "forged: another step's state": (
        "state.json",
        lambda p: restated(p, lambda s: s["train_state"].update(global_step=9)),
    ),
    "forged: a schedule that is none": ("state.json", lambda p: restated(p, lambda s: s.update(scheduler=[1]))),
    "a number beyond a double": ("manifest.json", lambda p: resealed_text(p, '{"step": 1e999}')),
    "half a character": ("manifest.json", lambda p: resealed_text(p, '{"strategy": "\\ud800"}')),
    "a key twice": ("manifest.json", lambda p: resealed_text(p, '{"step": 1, "step": 2}')),
    "not JSON": ("manifest.json", lambda p: resealed_text(p, '{"step": NaN}')),
    "nested JSON": ("manifest.json", lambda p: resealed_text(p, "[" * 100_000)),
}


def resealed_text(path, text):
    (path / "manifest.json").write_text(text)
    (path / "READY").write_bytes(ready_text(files.digest_bytes(text.encode())))


def test_clean(good):
    """An undamaged checkpoint has no problems, also where it cannot be written to."""
    found = verify_checkpoint(good)
    assert (found.ok, found.step, found.files) == (True, 1, 7)


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects(copy, defect):
    """Each defect is found, and its file named; resuming refuses it too."""
    file, damage = DEFECTS[defect]
    damage(copy)
    found = verify_checkpoint(copy)
    assert not found.ok
    assert file in [p.file for p in found.problems] or any(file in p.problem for p in found.problems)
    with pytest.raises(RunFailed, match="cannot be resumed"):
        CheckpointManager(copy.parent).load(copy, Training().state())


@pytest.mark.parametrize("extra", ["more.json", "rng/rank_00002.json", "rank_00002.safetensors", "folder", "link"])
def test_extra(copy, extra):
    """Whatever the manifest does not list is named."""
    if extra == "folder":
        (copy / extra).mkdir()
    elif extra == "link":
        (copy / extra).symlink_to("/")
    else:
        (copy / extra).touch()
    assert [p.file for p in verify_checkpoint(copy).problems] == [extra]


def test_swapped_shards(tmp_path):
    """Two equally long files of tensors that changed places are both named."""
    manager = CheckpointManager(tmp_path, asynchronous=False)
    manager.preflight()
    for step in (1, 2):
        training = Training(seed=step)
        training.done = step
        training.save(manager)
    one, other = (tmp_path / f"step_0000000{s}" / "rank_00000.safetensors" for s in (1, 2))
    assert one.stat().st_size == other.stat().st_size
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    for path in (one, other):
        assert [p.file for p in verify_checkpoint(path.parent).problems] == ["rank_00000.safetensors"]


def test_partial_folders_are_not_ready(copy):
    """FR-18: a folder without a fitting READY is not a checkpoint, and verification says so."""
    (copy / "READY").write_text("something else\n")
    assert not is_ready(copy)
    assert not verify_checkpoint(copy).ok


WRONG_VALUES = {
    "config": [None, [], "x"],
    "samples_seen": [None, -1, 1.0, True, "4", 10**30],
    "tokens_seen": [None, -1],
    "strategy": [None, 3, ["ddp"]],
    "precision": [None, 1],
    "config_fingerprint": [None, {}],
    "plugins": [None, {}, ["ddp"]],
    "created_at": [None, 7],
    "sequence": [None, -1],
    "storage": [None, 1],
}


@pytest.mark.parametrize("key", WRONG_VALUES)
def test_values_that_every_manifest_has(copy, key):
    """A value that is missing or of the wrong type, however well sealed, is named by verify and on opening."""
    for value in WRONG_VALUES[key]:
        resealed(copy, lambda m, value=value: m.update({key: value}))
        [problem] = verify_checkpoint(copy).problems
        assert problem.file == "manifest.json"
        assert repr(key) in problem.problem
        with pytest.raises(DamagedCheckpoint, match=key):
            open_checkpoint(copy)
    resealed(copy, lambda m: m.pop(key))
    assert repr(key) in verify_checkpoint(copy).problems[0].problem


def test_renamed(copy):
    """A folder with the name of another step is found by verify, and not resumed from; other names are free."""
    other = copy.rename(copy.parent / "step_00000007")
    [problem] = verify_checkpoint(other).problems
    assert "it is of step 1, but its folder is named step_00000007" in problem.problem
    with pytest.raises(RunFailed, match="its folder is named step_00000007"):
        CheckpointManager(copy.parent).load(other, Training().state())
    assert verify_checkpoint(other.rename(copy.parent / "best")).ok
