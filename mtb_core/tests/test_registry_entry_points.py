"""Tests of mtb_core.registry.entry_points."""

import sys
import zipfile

import pytest

from mtb_core.registry import entry_points
from mtb_core.registry.entry_points import Source, installed, parse


def test_agrees_with_the_library(install):
    """The folders' own answer is that of importlib.metadata, for what is installed here and a plugin beside it."""
    install(entry="zz", dist="Mtb.Zz")
    mine = sorted(entry_points._from_folders(), key=lambda s: s.name)
    theirs = sorted(entry_points._from_library(), key=lambda s: s.name)
    assert mine == theirs
    assert "Mtb.Zz" in {s.distribution for s in mine}


def test_shadowed_distribution_does_not_count(install):
    """Of one distribution found twice, the first on the path decides, even where it has no plugin."""
    install(entry="old", dist="mtb-twice", version="1.0")
    install(dist="mtb_twice", version="2.0", entry_points="[other]\na = b\n")
    assert "old" not in {s.name for s in installed()}


def test_order_is_by_name_then_distribution(install):
    """The order does not depend on the path's."""
    install(entry="b", dist="mtb-1")
    install(entry="a", dist="mtb-3")
    install(entry="b", dist="mtb-0")
    ours = [(s.name, s.distribution) for s in installed() if s.name in {"a", "b"}]
    assert ours == [("a", "mtb-3"), ("b", "mtb-0"), ("b", "mtb-1")]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("[mtb]\nx = a.b", "a.b"),
        ("[other]\ny = c\n[mtb]\n# comment\n\nx=a.b:obj\n[more]\nz = d", "a.b:obj"),
        ("[mtb]\nx = a.b [extra, more]", "a.b"),
        ("[mtb]\nx without equals", ""),
    ],
)
def test_parse(text, target):
    """Groups, comments, extras and damage are understood as the format says."""
    assert [s.target for s in parse(text, "d", "1")] == [target]


def test_archives_on_the_path_are_read_by_the_library(tmp_path, monkeypatch):
    """A plugin in a zip archive on the path is found too."""
    archive = tmp_path / "plugin.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("mtb_zip-3.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: mtb-zip\nVersion: 3.0\n")
        file.writestr("mtb_zip-3.0.dist-info/entry_points.txt", "[mtb]\nzipped = mtb_zip.plugin\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(archive)])
    assert Source("zipped", "mtb_zip.plugin", "mtb-zip", "3.0") in installed()
