"""A file that cannot be written is refused before anything is measured, and looking leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtb_core import ConfigError, check_output


@pytest.mark.parametrize(
    "place",
    [
        "/proc/x", "/proc/new/x.json", ".", "", f"{__file__}/x", f"{__file__}/new/x", "a" * 300, "new/" + "a" * 300,
        "a" * 300 + "/x", "/dev/null/x", "nul\0",
    ],
)  # fmt: skip
def test_places_that_cannot_be(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders, files in files, names that are too long, file systems without files: refused with option and reason."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)^--svg .*cannot be written: \S.*; name another file\.$"):
        check_output(place, "--svg")
    assert list(tmp_path.iterdir()) == []


def test_places_that_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New and old files, names as long as they may be, folders that are missing still, links, devices and pipes."""
    monkeypatch.chdir(tmp_path)
    old, link, pipe = tmp_path / "old.json", tmp_path / "link", tmp_path / "pipe"
    old.write_text("old")
    link.symlink_to("new.json")
    os.mkfifo(pipe)
    for place in ("new.json", "a/b/new.json", old, link, pipe, "n" * 255, "/dev/stdout", "/dev/full"):
        check_output(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old.json", "pipe"]
    assert old.read_text() == "old"


def test_what_is_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name; a folder's other files may be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("a.json", "run/result.json", "run/table.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "link").symlink_to("a.json")
    for place, inputs in (("a.json", ["b", "a.json"]), ("link", ["a.json"]), ("run/result.json", ["run"])):
        with pytest.raises(ConfigError, match="this command reads it, and would replace it; name another file"):
            check_output(place, inputs=inputs)
    for place in ("new.json", "run/table.json", "/dev/null"):
        check_output(place, inputs=["a.json", "run", "/dev/null", "missing", "nul\0"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_what_is_protected_stays(tmp_path: Path) -> None:
    """A file, and a folder, that this user must not write to."""
    (tmp_path / "closed").mkdir()
    (tmp_path / "file").write_text("kept")
    for place in ("closed", "file"):
        (tmp_path / place).chmod(0o500)
    for place in ("closed/x", "file"):
        with pytest.raises(ConfigError, match="Permission denied"):
            check_output(tmp_path / place)
