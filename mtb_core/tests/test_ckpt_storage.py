"""Tests of mtb_core.ckpt.storage: a format cannot break a checkpoint, and is asked for by name where it is missing."""

import json

import attrs
import pytest
import torch

from mtb_checkpoint import verify_checkpoint
from mtb_checkpoint.summary import summarize_folder
from mtb_core.api.errors import PluginError, RunFailed
from mtb_core.api.values import Piece, State
from mtb_core.ckpt import storage
from mtb_core.ckpt.entries import Part
from mtb_core.ckpt.manager import CheckpointManager
from mtb_core.ckpt.opened import open_checkpoint
from mtb_core.ckpt.safetensors import SafetensorsStorage
from mtb_core.ckpt.storage import FileLayout, Slot, laid_out
from mtb_core.cli import main
from mtb_core.registry.discovery import discover

from .ckpt_ranks import Training, resealed, run_ranks, saved

PARTS = [Part("a", "float32", (4,), (0,), (4,)), Part("b", "int64", (2,), (0,), (2,))]


class Wrong(SafetensorsStorage):
    """A format whose layouts are changed by `change`."""

    change = staticmethod(lambda layout: [layout])

    def lay_out(self, parts, rank):
        [layout] = super().lay_out(parts, rank)
        return self.change(layout)


def moved(layout, index, elements):
    return attrs.evolve(layout, slots={**layout.slots, index: Slot(elements)})


MISTAKES = {
    "no file": (lambda one: [], "names the files"),
    "another file": (lambda one: [attrs.evolve(one, name="other")], "names the files"),
    "a file twice": (lambda one: [one, attrs.evolve(one, slots={})], "names the files"),
    "the manifest": (lambda one: [one, FileLayout("manifest.json", 0, [], {})], "which is core's"),
    "READY": (lambda one: [one, FileLayout("READY", 0, [], {})], "which is core's"),
    "random state": (lambda one: [one, FileLayout("rng/rank_00000.json", 0, [], {})], "which is core's"),
    "outside": (lambda one: [one, FileLayout("../x", 0, [], {})], "not a plain path"),
    "a part less": (lambda one: [attrs.evolve(one, slots={0: one.slots[0]})], "has places for the parts"),
    "a part twice": (lambda one: [one, FileLayout("more", 16, [], {0: Slot(0)})], "has places for the parts"),
    "a part more": (lambda one: [attrs.evolve(one, slots={**one.slots, 2: Slot(0)})], "has places for the parts"),
    "not aligned": (lambda one: [moved(one, 1, one.slots[1].elements + 1)], "not aligned"),
    "over another": (lambda one: [moved(one, 1, one.slots[0].elements - 8)], "over"),
    "over fixed bytes": (lambda one: [moved(one, 0, 8)], "over"),
    "beyond the end": (lambda one: [attrs.evolve(one, size=one.size - 1)], "outside"),
    "before the start": (lambda one: [attrs.evolve(moved(one, 0, -64), fixed=[])], "over the start"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_layouts_are_checked(kind):
    """A format that loses a part, puts it over something else or takes core's files is refused before a buffer is made."""
    change, problem = MISTAKES[kind]
    wrong = Wrong()
    wrong.change = change
    with pytest.raises(ValueError, match=problem):
        laid_out(wrong, PARTS, 0)
    assert laid_out(SafetensorsStorage(), PARTS, 0)


def refused(rank, folder):
    wrong = Wrong()
    wrong.change = (lambda one: []) if rank else (lambda one: [one])
    storage.storage_named = lambda *_: wrong
    import mtb_core.ckpt.manager as module

    module.storage_named = storage.storage_named
    manager = CheckpointManager(folder)
    try:
        manager.preflight(State({"w": [Piece(torch.ones(2), (2,), (0,))]}))
    except RunFailed as error:
        return str(error)
    return None


def test_a_wrong_format_fails_on_all_ranks(tmp_path):
    """What a format does wrong on one rank is raised on all, before anything is written."""
    one, other = run_ranks(2, refused, tmp_path)
    assert one == other
    assert "rank 1: ValueError: the checkpoint format names the files" in one


@pytest.fixture
def foreign(tmp_path):
    """A checkpoint whose tensors are in a format that nobody has."""
    saved(tmp_path, (1, 2))
    path = tmp_path / "step_00000002"
    resealed(path, lambda m: m.update(storage="zarr", storage_distribution="mtb-zarr"))
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["checkpoint", "verify", "{path}"],
        ["checkpoint", "verify", "{path}", "{path}"],
        ["checkpoint", "show", "{path}"],
        ["checkpoint", "export", "{path}", "--output", "{folder}/w.safetensors"],
        ["train", "--steps", "1", "--resume", "{path}"],
        ["train", "--steps", "1", "--checkpoint-dir", "{folder}", "--resume", "auto"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_missing_format(foreign, command, capsys):
    """Every command that reads tensors says which format they are in and what to install: exit code 2."""
    filled = [word.format(path=foreign, folder=foreign.parent) for word in command]
    assert main(filled) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "Unknown checkpoint format 'zarr'" in error
    assert "pip install mtb-zarr" in error


def test_missing_format_elsewhere(foreign):
    """The list says so in the row; a loop gets an error on all ranks; pruning needs no format."""
    rows = summarize_folder(foreign.parent)["checkpoints"]
    assert [row["ready"] for row in rows] == [True, True]
    assert rows[0]["problem"] is None
    assert "Unknown checkpoint format 'zarr'" in rows[1]["problem"]
    assert rows[1]["strategy"] == "single"
    with pytest.raises(RunFailed, match=r"Unknown checkpoint format 'zarr'.*pip install mtb-zarr"):
        CheckpointManager(foreign.parent).load(foreign, Training().state())
    for read in (open_checkpoint, verify_checkpoint):
        with pytest.raises(PluginError, match="pip install mtb-zarr"):
            read(foreign)


def test_a_name_that_is_no_format(tmp_path, capsys):
    """--checkpoint-format is checked before any rank starts, and what it lists is what is installed."""
    assert main(["train", "--steps", "1", "--checkpoint-format", "safetensor", "--run-dir", str(tmp_path / "r")]) == 2
    assert "Did you mean 'safetensors'?" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "r").exists()
    assert "safetensors" in discover().checkpoint_formats


def test_the_manifest_names_it(tmp_path):
    """Format and origin are in the manifest, and the README says what the files are."""
    saved(tmp_path)
    manifest = json.loads((tmp_path / "step_00000001" / "manifest.json").read_text())
    assert (manifest["format_version"], manifest["storage"], manifest["storage_distribution"]) == (
        4,
        "safetensors",
        "mtb-core",
    )
    assert "rank_*.safetensors" in (tmp_path / "step_00000001" / "README.md").read_text()
