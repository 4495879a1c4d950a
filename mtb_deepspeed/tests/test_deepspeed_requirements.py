"""Without DeepSpeed, or with another one, the plugin is listed with the reason and nothing else fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtb_deepspeed import requirements


def test_this_installation_is_fine() -> None:
    """DeepSpeed is here, in the version that is known."""
    requirements.check_requirements()


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names both versions."""
    monkeypatch.setattr(requirements, "VERSION", "0.0.1")
    with pytest.raises(ImportError, match=r"DeepSpeed 0.19.8 is installed.*private to 0.0.1"):
        requirements.check_requirements()


def test_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without metadata nobody knows what it is."""
    monkeypatch.setattr(requirements.os, "listdir", lambda _: [])
    with pytest.raises(ImportError, match="of an unknown version"):
        requirements.check_requirements()


def mtb(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `mtb` where DeepSpeed cannot be found."""
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['deepspeed'] = None\n")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "mtb_core", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=folder,
    )


def test_without_deepspeed(tmp_path: Path) -> None:
    """The plugin is listed as failed with the reason; asking for it gives the reason; other runs work."""
    listed = mtb(tmp_path, "plugins", "list", "--json")
    (record,) = [r for r in json.loads(listed.stdout)["plugins"] if r["name"] == "deepspeed"]
    assert record["status"] == "failed"
    assert "pip install deepspeed==" in record["reason"]
    asked = mtb(tmp_path, "train", "--strategy", "deepspeed", "--device", "cpu")
    assert asked.returncode == 2
    assert "DeepSpeed is not installed" in asked.stderr
    tiny = ["--steps", "1", "--warmup-steps", "0", "--d-model", "8", "--n-heads", "1", "--n-layers", "1"]
    other = mtb(tmp_path, "train", "--device", "cpu", "--vocab-size", "16", "--seq-length", "4", *tiny)
    assert other.returncode == 0, other.stderr
