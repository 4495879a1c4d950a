"""Tests of mtb_core.ckpt.catalog and layout: what is found, and which one is resumed from."""

import os
import shutil

import pytest

from mtb_core.api.errors import ConfigError, RunFailed
from mtb_core.ckpt.catalog import find, is_ready, list_steps, newest, read_latest
from mtb_core.ckpt.layout import dump_json, parse_json, shown, step_name, step_of

from .ckpt_ranks import saved


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with steps 2 and 10."""
    folder = tmp_path_factory.mktemp("two")
    saved(folder, (2, 10))
    return folder


@pytest.fixture
def folder(two, tmp_path):
    """A copy of it."""
    return shutil.copytree(two, tmp_path / "c")


def test_names():
    """Only the canonical name of a step is one; steps compare as integers."""
    assert step_of(step_name(10)) == 10
    assert step_of(step_name(123456789)) == 123456789
    for name in (
        "step_10",
        "step_000000010",
        "step_0000001x",
        ".tmp-step_00000010-0",
        "step_00000010.old",
        "step_-0000001",
    ):
        assert step_of(name) is None


def test_pointer(folder, caplog):
    """The pointer decides, without a warning."""
    assert newest(folder) == folder / "step_00000010"
    assert not caplog.records


@pytest.mark.parametrize("content", [None, "", "step_00000099", "../../etc", "step_10\n", "x" * 1000, "/step_00000010"])
def test_no_use_of_a_bad_pointer(folder, content, caplog):
    """FR-21: missing, dangling or meaningless: the highest READY step, with a warning."""
    (folder / "latest").unlink()
    if content is not None:
        (folder / "latest").write_text(content)
    assert newest(folder) == folder / "step_00000010"
    assert "newest complete checkpoint" in caplog.text


def test_pointer_to_an_incomplete_one(folder, caplog):
    """FR-18: what the pointer names is not taken if it is incomplete."""
    (folder / "step_00000010" / "READY").unlink()
    assert newest(folder) == folder / "step_00000002"
    assert "incomplete" in caplog.text


def test_pointer_that_is_behind(folder, caplog):
    """FR-18: a checkpoint that was completed after the pointer was written goes before it."""
    (folder / "latest").write_text("step_00000002\n")
    assert newest(folder) == folder / "step_00000010"
    assert "was completed after it" in caplog.text


def test_lower_step_published_later(tmp_path, caplog):
    """After going back to an earlier step, the pointer is right though higher steps exist."""
    saved(tmp_path, (2, 10))
    saved(tmp_path, (3,))
    assert newest(tmp_path) == tmp_path / "step_00000003"
    assert not caplog.records


def test_nothing(tmp_path):
    """Nothing READY: ``auto`` starts anew, ``latest`` refuses."""
    (tmp_path / "step_00000001").mkdir()
    for place in (tmp_path, tmp_path / "missing"):
        assert find(place, "auto") is None
        with pytest.raises(ConfigError, match="--resume auto"):
            find(place, "latest")


def test_paths(folder):
    """A path resumes that checkpoint; anything else says what is valid."""
    assert find(None, str(folder / "step_00000002")) == folder / "step_00000002"
    with pytest.raises(ConfigError, match=r"name one of them .step_00000002, step_00000010"):
        find(None, str(folder))
    with pytest.raises(ConfigError, match="no such folder"):
        find(None, str(folder / "step_00000003"))
    (folder / "step_00000002" / "READY").unlink()
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        find(None, str(folder / "step_00000002"))
    with pytest.raises(ConfigError, match="--checkpoint-dir"):
        find(None, "latest")


def test_links_are_not_checkpoints(folder):
    """A step that is a link is listed as not READY."""
    (folder / "step_00000011").symlink_to(folder / "step_00000010")
    assert not is_ready(folder / "step_00000011")
    assert [(f.step, f.ready) for f in list_steps(folder)] == [(2, True), (10, True), (11, False)]
    assert read_latest(folder / "missing") is None


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_pointer_that_is_no_file(folder, kind):
    """A pointer that is not a regular file is none; nothing waits for somebody to write into a FIFO."""
    (folder / "latest").unlink()
    if kind == "fifo":
        os.mkfifo(folder / "latest")
    elif kind == "link":
        (folder / "name").write_text("step_00000002\n")
        (folder / "latest").symlink_to("name")
    else:
        (folder / "latest").mkdir()
    assert read_latest(folder) is None
    assert newest(folder) == folder / "step_00000010"


def test_named_link(folder):
    """A link to a checkpoint that is named on purpose stands for the checkpoint."""
    (folder / "best").symlink_to("step_00000002")
    assert find(None, str(folder / "best")) == folder / "step_00000002"


def test_shown():
    """What is not printable is escaped, and everything can be encoded."""
    assert shown("a\x1b[2J\n\ud800\u202eé") == "a\\x1b[2J\\n\\ud800\\u202eé"


@pytest.mark.parametrize("text", [b'"\\ud800"', b'{"\\uDFFF": 1}', b'"\xed\xa0\x80"', b"[1e999]", b"-1e999"])
def test_json_that_cannot_be_written_again(text):
    """Numbers beyond a double and halves of surrogate pairs are refused; whole pairs are text."""
    with pytest.raises(ValueError, match=r"too large|UTF-8"):
        parse_json(text)
    assert parse_json(b'"\\ud83d\\ude00"') == "\U0001f600"


@pytest.mark.parametrize("text", [b"NaN", b"[Infinity]", b'{"a": 1, "a": 2}', b"[" * 10**5, b"\xff", b""])
def test_strict_json(text):
    """Only strict JSON is read, and only strict JSON is written."""
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(text)
    with pytest.raises(ValueError, match="Out of range"):
        dump_json({"a": float("nan")})


def no_manifest(step):
    (step / "manifest.json").unlink()


def cut(step):
    text = (step / "manifest.json").read_bytes()
    (step / "manifest.json").write_bytes(text[:-5])


def no_file(step):
    """As where the disk gives an error: READY is there, and reading it fails."""
    (step / "READY").unlink()
    (step / "READY").mkdir()
    (step / "READY" / "x").touch()


def shorter(step):
    step.rename(step.with_name("step_" + step.name[-4:]))


@pytest.mark.parametrize("damage", [no_manifest, cut, no_file, shorter])
@pytest.mark.parametrize("selector", ["auto", "latest"])
def test_lost_checkpoints_are_no_new_start(folder, damage, selector, caplog):
    """One that is lost is told, and the other one taken; where all are lost, nothing starts anew beside them."""
    damage(folder / "step_00000010")
    assert find(folder, selector) == folder / "step_00000002"
    assert "step_" in caplog.text
    assert "0010" in caplog.text
    damage(folder / "step_00000002")
    with pytest.raises(RunFailed, match=r"none can be used .*step_0+2"):
        find(folder, selector)


def test_a_pointer_without_checkpoints_is_no_new_start(folder):
    """If ``latest`` is all that is left, somebody has taken checkpoints away."""
    for step in folder.glob("step_*"):
        shutil.rmtree(step)
    with pytest.raises(RunFailed, match="latest: it is there"):
        find(folder, "auto")


def test_saves_that_were_killed_are_no_loss(folder):
    """Steps that were never published, without READY or with an empty one, do not keep training from starting anew."""
    (folder / "latest").unlink()
    (folder / "step_00000002" / "READY").unlink()
    (folder / "step_00000010" / "READY").write_bytes(b"")
    assert find(folder, "auto") is None


def test_a_folder_that_cannot_be_read_is_no_new_start(folder, monkeypatch):
    """An error of the disk, or of permissions, ends the run; its words are shown."""

    def fail(_self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.iterdir", fail)
    with pytest.raises(RunFailed, match="cannot be looked at: Permission denied"):
        find(folder, "auto")
