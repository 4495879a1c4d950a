"""Tests of mtb_core.cli.init."""

import pytest

from mtb_core.cli import main
from mtb_core.config import load_config, settings


def test_writes_a_configuration(tmp_path, monkeypatch, capsys):
    """`mtb init` writes mtb.toml, which is valid and mentions every setting but the table of strategy options."""
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert "mtb train --config mtb.toml" in capsys.readouterr().out
    config = load_config(file="mtb.toml")
    assert config.model == "gpt"
    text = (tmp_path / "mtb.toml").read_text()
    assert [name for name in settings() if name not in text] == []


def test_every_commented_default_is_valid(tmp_path):
    """Uncommenting a setting that has a default changes nothing."""
    file = tmp_path / "x.toml"
    assert main(["init", str(file)]) == 0
    before = load_config(file=file)
    lines = [
        line.removeprefix("# ")
        if line.startswith("# ") and line.split()[1] in settings() and not line.endswith("=")
        else line
        for line in file.read_text().splitlines()
    ]
    file.write_text("\n".join(lines))
    assert load_config(file=file) == before


def test_again_changes_nothing(tmp_path, capsys):
    """The command may be repeated as long as its file was not edited."""
    file = tmp_path / "x.toml"
    assert main(["init", str(file)]) == 0
    before = file.read_bytes()
    assert main(["init", str(file)]) == 0
    assert "unchanged" in capsys.readouterr().out
    assert file.read_bytes() == before


def test_does_not_overwrite(tmp_path, capsys):
    """An existing file is kept, unless --force."""
    file = tmp_path / "x.toml"
    file.write_text("seed = 5\n")
    assert main(["init", str(file)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert file.read_text() == "seed = 5\n"
    assert main(["init", "--force", str(file)]) == 0
    assert load_config(file=file).seed == 0


@pytest.mark.parametrize("name", ["no/such/folder/x.toml", "."])
def test_cannot_write(name, tmp_path, monkeypatch, capsys):
    """A place that cannot be written to is named, with exit code 2."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--force", name]) == 2
    assert f"Cannot write {name}" in capsys.readouterr().err
