"""Core without a plugin that vouches for runs, and with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtb_core import ConfigError, Evidence, PluginError, Result, TrainConfig, hookimpl, run
from mtb_core.registry.discovery import discover

SIZE: dict[str, Any] = {
    "seq_length": 8, "d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 64,
    "steps": 2, "warmup_steps": 0, "device": "cpu", "sink": ("jsonl",),
}  # fmt: skip

PLUGIN = """
class Own(Evidence):
    def obstacles(self, argv):
        return ["it is Monday"]
    def origin(self, argv, device="cpu"):
        return {{"environment": {{"device": device}}, "provenance": {{"command": argv[0]}}}}
    def performance(self, ctx, rows, reasons):
        return {{"performance_valid": True, "conditions": {{"rows": [row["steps"] for row in rows]}}}}
    def audit(self, folder):
        return ["a.json tells too much"] if (folder / "a.json").exists() else []

@hookimpl
def mtb_evidence():
    return [EvidenceInfo("{name}", "A test's.", __name__ + ":Own")]
"""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if `mtb-evidence` were not installed, here and on ranks."""
    monkeypatch.setenv("MTB_DISABLE_PLUGINS", "evidence")
    return monkeypatch


class Fails:
    """A run plugin that ends the run."""

    @hookimpl
    def mtb_run_started(self) -> None:
        raise RuntimeError("no")


class Tells:
    """A run plugin that leaves a file."""

    @hookimpl
    def mtb_run_started(self, info) -> None:
        (info.folder / "a.json").touch()


def not_vouched(result: Result, folder: Path) -> bool:
    """Whether `result`, here and as written, claims nothing, and says what to install."""
    written = json.loads((folder / "result.json").read_text())
    assert written == result.to_json()
    assert (result.performance_valid, result.publishable) == (False, False)
    return "mtb-evidence" in " ".join(result.unpublishable_reasons)


def test_without_a_plugin_a_run_works(alone, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It trains to its end; the result claims nothing of machine, code and times, and names what to install."""
    result = run(TrainConfig(run_dir=str(tmp_path), **SIZE), quiet=True).check()
    assert not_vouched(result, tmp_path)
    assert (result.execution_complete, result.environment, result.provenance, result.conditions) == (True, {}, {}, {})
    assert any("mtb-evidence" in reason for reason in result.performance_invalid_reasons)
    assert capsys.readouterr().err == ""


def test_without_a_plugin_a_failed_run_has_a_result(alone, tmp_path: Path) -> None:
    """Its reason stays the first thing said."""
    result = run(TrainConfig(run_dir=str(tmp_path), **SIZE), quiet=True, plugins={"fails": Fails})
    assert result.exit_reason == "failed"
    assert not_vouched(result, tmp_path)
    assert result.performance_invalid_reasons == ["the run ended early: failed"]


def test_without_a_plugin_nothing_left_to_do_has_a_result(alone, tmp_path: Path) -> None:
    """Also where no rank is started."""
    more = SIZE | {"steps": None, "until_step": 2, "save_every": 1, "checkpoint_dir": str(tmp_path / "c")}
    run(TrainConfig(run_dir=str(tmp_path / "a"), **more), quiet=True).check()
    again = run(TrainConfig(run_dir=str(tmp_path / "b"), resume="latest", **more), quiet=True).check()
    assert again.global_step == 2
    assert not_vouched(again, tmp_path / "b")


def test_without_a_plugin_formal_is_refused(alone, tmp_path: Path) -> None:
    """What cannot be known cannot be published; nothing is started."""
    with pytest.raises(ConfigError, match=r"--formal cannot begin: .*install mtb-evidence"):
        run(TrainConfig(formal=True, run_dir=str(tmp_path / "run"), **SIZE), quiet=True)
    assert not (tmp_path / "run").exists()


def test_without_a_plugin_nothing_private_is_written(alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Result and checkpoints are clean of home folders."""
    home = tmp_path / "people" / "alice"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    config = TrainConfig(run_dir=str(home / "run"), checkpoint_dir=str(home / "run" / "c"), save_every=1, **SIZE)
    run(config, quiet=True).check()
    texts = [path for path in (home / "run").rglob("*") if path.suffix in (".json", ".toml", ".jsonl")]
    assert len(texts) > 4
    assert not [path for path in texts if "alice" in path.read_text()]


def test_a_plugin_vouches(alone, install, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its keys are the result's, its search marks the result, and its obstacles refuse ``--formal``."""
    install(PLUGIN.format(name="own"))
    config = TrainConfig(run_dir=str(tmp_path / "run"), **SIZE, repeat=2)
    result = run(config, quiet=True, plugins={"tells": Tells}).check()
    assert (result.environment, result.conditions) == ({"device": "cpu"}, {"rows": [2, 2]})
    assert (result.performance_valid, result.publishable) == (True, False)
    assert result.unpublishable_reasons == ["a.json tells too much"]
    assert "a.json tells too much" in " ".join(capsys.readouterr().err.split())
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result.to_json()
    with pytest.raises(ConfigError, match=r"--formal cannot begin: it is Monday\."):
        run(TrainConfig(formal=True, **SIZE), quiet=True)


def test_one_plugin_vouches_at_most(alone, install) -> None:
    """With two, nobody could tell whose word counts; the message names both."""
    assert type(discover().make_evidence()) is Evidence
    for name in ("own", "other"):
        install(PLUGIN.format(name=name), entry=name, dist=f"mtb-{name}")
    with pytest.raises(PluginError, match=r"disable all but one of: other, own\."):
        discover().make_evidence()
