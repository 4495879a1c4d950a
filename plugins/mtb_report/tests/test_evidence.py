"""`mtb evidence`: digests, batches of one place and source, and the search for what must not be handed on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mtb_core import CheckFailed, ConfigError
from mtb_report.evidence.command import evidence


def invoke(*words: str) -> Result:
    return CliRunner().invoke(evidence, list(words), standalone_mode=False)


def write(path: Path, **more: Any) -> Path:
    values = {
        "schema_version": 1,
        "benchmark": "training",
        "exit_reason": "done",
        "strategy": "ddp",
        "environment": {"torch": "2.13.0", "cpu_model": "X", "torch_threads": 1, "variables": {}},
        "provenance": {"git_revision": "abc", "git_dirty": False, "command": "mtb train", "complete": True},
        "execution_complete": True,
        "performance_valid": True,
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


def manifest(folder: Path, *words: str) -> dict[str, Any]:
    done = invoke("manifest", str(folder), "--json", *words)
    assert done.exception is None, done.exception
    return json.loads(done.stdout)


def test_each_result_has_its_digest_and_origin(tmp_path: Path) -> None:
    """Of a result: SHA-256 of the file, status, command, revision, validity; the manifest is in the folder."""
    file = write(tmp_path / "run" / "result.json")
    got = manifest(tmp_path)
    (entry,) = got["results"]
    assert entry["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert entry["path"] == "run/result.json"
    assert (entry["status"], entry["command"], entry["git_revision"]) == ("success", "mtb train", "abc")
    assert (entry["performance_valid"], entry["provenance_complete"]) == (True, True)
    assert json.loads((tmp_path / "manifest.json").read_text()) == got


@pytest.mark.parametrize(
    "change",
    [
        {"environment": {"torch": "2.12.0", "cpu_model": "X"}},
        {"environment": {"torch": "2.13.0", "cpu_model": "Y"}},
        {"environment": {}},
        {"provenance": {"git_revision": "def", "git_dirty": False}},
        {"provenance": {"git_revision": "abc", "git_dirty": True}},
        {"provenance": {"git_revision": "abc", "git_dirty": False, "image_id": "sha256:1"}},
    ],
)
def test_unlike_places_and_sources_are_never_one_batch(tmp_path: Path, change: dict[str, Any]) -> None:
    """Other software, machine, revision, changed files or image: another batch, and --one-batch fails."""
    write(tmp_path / "a.json")
    write(tmp_path / "b.json", **change)
    got = manifest(tmp_path)
    assert got["one_batch"] is False
    assert [batch["results"] for batch in got["batches"]] == [["a.json"], ["b.json"]]
    assert isinstance(invoke("manifest", str(tmp_path), "--one-batch").exception, CheckFailed)


def test_settings_of_a_run_do_not_split_a_batch(tmp_path: Path) -> None:
    """Threads and variables may differ from run to run on one machine; a sweep has no batch of its own."""
    write(tmp_path / "a.json")
    write(
        tmp_path / "b.json",
        environment={"torch": "2.13.0", "cpu_model": "X", "torch_threads": 2, "variables": {"A": 1}},
    )
    write(tmp_path / "sweep.json", benchmark="sweep", environment={}, cells=[])
    assert manifest(tmp_path, "--one-batch")["one_batch"] is True


def test_a_manifest_made_again_is_the_same(tmp_path: Path) -> None:
    """An earlier manifest in the folder is no result."""
    write(tmp_path / "a.json")
    first = manifest(tmp_path)
    second = manifest(tmp_path)
    assert first["results"] == second["results"]


def test_a_broken_result_is_named(tmp_path: Path) -> None:
    """It is listed with the reason, and the command fails."""
    write(tmp_path / "a.json")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "result.json").write_text("{")
    done = invoke("manifest", str(tmp_path))
    assert isinstance(done.exception, CheckFailed)
    assert "b/result.json" in str(done.exception)


def test_changes_are_found(tmp_path: Path) -> None:
    """Verify passes what is as it was, and names what was changed or removed."""
    write(tmp_path / "a.json")
    write(tmp_path / "b.json")
    manifest(tmp_path)
    assert invoke("verify", str(tmp_path)).exception is None
    write(tmp_path / "a.json", strategy="fsdp")
    (tmp_path / "b.json").unlink()
    done = invoke("verify", str(tmp_path))
    assert isinstance(done.exception, CheckFailed)
    assert "a.json was changed" in str(done.exception)
    assert "b.json cannot be read" in str(done.exception)


@pytest.mark.parametrize("key", ["status", "performance_valid", "git_revision", "batch"])
def test_a_manifest_that_says_something_else_of_a_result_is_found(tmp_path: Path, key: str) -> None:
    """The digests of the results alone would not show it."""
    write(tmp_path / "a.json")
    manifest(tmp_path)
    file = tmp_path / "manifest.json"
    said = json.loads(file.read_text())
    said["results"][0][key] = "other"
    file.write_text(json.dumps(said))
    done = invoke("verify", str(tmp_path))
    assert isinstance(done.exception, CheckFailed)
    assert f"of a.json the manifest says another {key} than the result" in str(done.exception)


def test_batches_that_were_joined_are_found(tmp_path: Path) -> None:
    """Results of unlike environments are no one batch because a manifest says so."""
    write(tmp_path / "a.json")
    write(tmp_path / "b.json", environment={"torch": "1.0"})
    manifest(tmp_path)
    file = tmp_path / "manifest.json"
    said = json.loads(file.read_text())
    assert len(said["batches"]) == 2
    for change in ({"one_batch": True}, {"batches": said["batches"][:1]}):
        file.write_text(json.dumps({**said, **change}))
        done = invoke("verify", str(tmp_path))
        assert isinstance(done.exception, CheckFailed)
        assert "does not follow from the results" in str(done.exception)


@pytest.mark.parametrize("words", [(), ("--output", "result.json")])
def test_a_manifest_replaces_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    """A result where the manifest would be written is left as it is, and the command says what to do."""
    monkeypatch.chdir(tmp_path)
    files = [write(tmp_path / "manifest.json"), write(tmp_path / "result.json")]
    before = [file.read_bytes() for file in files]
    done = invoke("manifest", ".", *words)
    assert isinstance(done.exception, ConfigError)
    assert "--output" in str(done.exception)
    assert [file.read_bytes() for file in files] == before


def test_added_results_are_named(tmp_path: Path) -> None:
    """A result that the manifest does not list is no part of what it stands for."""
    write(tmp_path / "a.json")
    manifest(tmp_path)
    write(tmp_path / "late" / "result.json")
    done = invoke("verify", str(tmp_path))
    assert isinstance(done.exception, CheckFailed)
    assert "late/result.json was added" in str(done.exception)


@pytest.mark.parametrize(
    "results",
    [None, 3, {"a": 1}, ["a.json"], [{"path": "a.json"}], [{"path": 1, "sha256": "x"}],
     [{"path": "../a.json", "sha256": "x"}], [{"path": "/a.json", "sha256": "x"}]],
)  # fmt: skip
def test_a_broken_manifest_is_refused(tmp_path: Path, results: Any) -> None:
    """In words, not by a traceback, and nothing outside the folder is read."""
    write(tmp_path / "a.json")
    (tmp_path / "manifest.json").write_text(json.dumps({"benchmark": "evidence_manifest", "results": results}))
    done = invoke("verify", str(tmp_path))
    assert isinstance(done.exception, ConfigError)
    assert "broken manifest" in str(done.exception)


def test_audit(tmp_path: Path) -> None:
    """A clean folder passes; a home folder in a log fails, named by file and kind but not repeated."""
    write(tmp_path / "a.json")
    assert invoke("audit", str(tmp_path)).exception is None
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank.log").write_text("reading /home/alice/corpus")
    done = invoke("audit", str(tmp_path), "--json")
    assert isinstance(done.exception, CheckFailed)
    assert json.loads(done.stdout) == {"found": {"logs/rank.log": ["a home folder"]}, "not_searched": {}}
    assert "alice" not in str(done.exception)


def test_audit_tells_what_it_did_not_search(tmp_path: Path) -> None:
    """A binary file is listed, and the folder passes; a file that cannot be read fails it."""
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)))
    done = invoke("audit", str(tmp_path))
    assert done.exception is None
    assert "Not searched: weights.bin: it is binary" in done.stdout
    (tmp_path / "trace.json.gz").write_bytes(b"no gzip")
    done = invoke("audit", str(tmp_path), "--json")
    assert isinstance(done.exception, CheckFailed)
    assert "trace.json.gz" in str(done.exception)
    assert set(json.loads(done.stdout)["not_searched"]) == {"weights.bin", "trace.json.gz"}


def test_wrong_usage(tmp_path: Path) -> None:
    """No folder, no results, no manifest."""
    for words in (("manifest", str(tmp_path / "none")), ("manifest", str(tmp_path)), ("verify", str(tmp_path))):
        assert isinstance(invoke(*words).exception, ConfigError), words
