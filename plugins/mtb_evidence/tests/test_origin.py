"""Environment and provenance: what is recorded, and what must never be."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from mtb_core import World
from mtb_core.ranks.network import single_node_interface
from mtb_evidence import origin as module
from mtb_evidence.origin import environment, in_container, provenance, same_revision

FIELDS = {
    "git_revision",
    "git_dirty",
    "git_diff_digest",
    "build_revision",
    "image_ref",
    "image_id",
    "base_image",
    "command",
    "complete",
    "missing_fields",
}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if outside of any container, and without MTB_* variables."""
    for name in [n for n in os.environ if n.startswith("MTB_")]:
        monkeypatch.delenv(name)
    for name in module._CONTAINER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "_CONTAINER_MARKS", ())
    return monkeypatch


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with one commit."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("pass\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "train.py"], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def test_environment_is_strict_json_and_names_what_matters() -> None:
    """Versions and hardware are there; the document is strict JSON; a CPU run says nothing of CUDA."""
    got = json.loads(json.dumps(environment("cpu"), allow_nan=False))
    for name in ("os", "cpu_model", "python", "torch"):
        assert isinstance(got[name], str)
        assert got[name]
    assert 1 <= got["cpu_cores"] <= got["cpu_cores_total"]
    assert got["memory_mib"] > 0
    assert got["cuda"] is None
    assert "numpy" in got["libraries"]


def test_only_listed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables come from a list; proxies, tokens and unknown ones never do; values are cleaned."""
    home = str(Path("~").expanduser())
    secrets = {
        "https_proxy": "http://user:hunter2@proxy.example:3128",
        "HF_TOKEN": "hunter2",
        "NCCL_HUNTER": "hunter2",
        "HOSTNAME": "hunter2",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,MIG-1f2e")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "10.1.2.3")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"file:{home}/x")
    text = json.dumps(environment())
    assert "hunter2" not in text
    assert "proxy" not in text
    variables = environment()["variables"]
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["CUDA_VISIBLE_DEVICES"] == "<gpu>,<gpu>"
    assert variables["GLOO_SOCKET_IFNAME"] == "<address>"
    assert variables["PYTORCH_ALLOC_CONF"] == "file:~/x"


def test_what_mtb_sets_itself_is_no_part_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on one and on two ranks of a machine are of one environment; what the user chose is recorded."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with single_node_interface(World(2, 2)):
        assert "GLOO_SOCKET_IFNAME" in os.environ
        assert "GLOO_SOCKET_IFNAME" not in environment()["variables"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with single_node_interface(World(2, 2)):
        assert environment()["variables"]["GLOO_SOCKET_IFNAME"] == "lo"


def test_host_name_and_home_never_show() -> None:
    """Neither this host's name nor the home folder is anywhere in environment and provenance."""
    host, home = socket.gethostname(), str(Path("~").expanduser())
    argv = [
        f"{home}/bin/mtb",
        "train",
        "--data",
        f"{home}/corpus",
        "--rdzv-endpoint",
        f"{host}:29500",
        "--run-dir",
        f"runs/{host}",
    ]
    text = json.dumps({"e": environment(), "p": provenance(argv)})
    assert f'"{host}' not in text
    assert host not in provenance(argv)["command"].split()
    assert f"/{host}" not in text
    assert f"{home}/" not in text


def test_provenance_of_a_clean_and_a_changed_checkout(outside: pytest.MonkeyPatch, checkout: Path) -> None:
    """The revision is that of HEAD; dirty means that a tracked file differs; nothing is missing outside a container."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, check=True, capture_output=True, text=True).stdout
    (checkout / "notes.txt").write_text("untracked files do not count\n")
    got = provenance(["mtb", "train"], folder=checkout)
    assert set(got) == FIELDS
    assert (got["git_revision"], got["git_dirty"]) == (head.strip(), False)
    assert got["complete"] is True
    assert got["missing_fields"] == []
    assert got["image_ref"] is None
    assert got["git_diff_digest"] is None
    (checkout / "train.py").write_text("fail\n")
    changed = provenance(["mtb"], folder=checkout)
    assert changed["git_dirty"] is True
    printed = subprocess.run(["git", "diff", "HEAD"], cwd=checkout, check=True, capture_output=True).stdout
    assert changed["git_diff_digest"] == hashlib.sha256(printed).hexdigest()
    (checkout / "train.py").write_text("again\n")
    assert provenance(["mtb"], folder=checkout)["git_diff_digest"] != changed["git_diff_digest"]


def test_variables_of_git_name_no_other_checkout(outside: pytest.MonkeyPatch, checkout: Path, tmp_path: Path) -> None:
    """Started by a hook of another repository, a run still records its own."""
    before = provenance(["mtb"], folder=checkout)
    other = tmp_path / "other"
    subprocess.run(["git", "init", "-q", str(other)], check=True)
    outside.setenv("GIT_DIR", str(other / ".git"))
    outside.setenv("GIT_WORK_TREE", str(other))
    outside.setenv("GIT_INDEX_FILE", str(other / "index"))
    after = provenance(["mtb"], folder=checkout)
    assert (after["git_revision"], after["git_dirty"]) == (before["git_revision"], False)


def test_without_a_checkout_the_revision_is_missing(outside: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No checkout and no variable: said so, not invented; dirty is unknown, not false."""
    outside.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    got = provenance(["mtb"], folder=tmp_path)
    assert (got["git_revision"], got["git_dirty"]) == (None, None)
    assert got["missing_fields"] == ["git_revision", "git_dirty"]
    assert got["complete"] is False


def test_without_git_nothing_breaks(outside: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without git still gets a record."""
    outside.setenv("PATH", str(tmp_path))
    assert provenance(["mtb"])["git_revision"] is None


def test_revision_can_be_given(outside: pytest.MonkeyPatch, checkout: Path) -> None:
    """MTB_GIT_REVISION wins; whether it is clean is known only where the checkout is at that revision."""
    outside.setenv("MTB_GIT_REVISION", "0123abc")
    got = provenance(["mtb"], folder=checkout)
    assert (got["git_revision"], got["git_dirty"]) == ("0123abc", None)
    assert got["missing_fields"] == ["git_dirty"]


@pytest.mark.parametrize("digits", [7, 12, 40])
def test_a_revision_that_is_given_hides_no_changes(outside: pytest.MonkeyPatch, checkout: Path, digits: int) -> None:
    """MTB_GIT_REVISION that names HEAD, whole or shortened, leaves it known that files differ; the whole is recorded."""
    head = provenance(["mtb"], folder=checkout)["git_revision"]
    outside.setenv("MTB_GIT_REVISION", head[:digits])
    assert provenance(["mtb"], folder=checkout)["git_dirty"] is False
    (checkout / "train.py").write_text("changed\n")
    got = provenance(["mtb"], folder=checkout)
    assert (got["git_revision"], got["git_dirty"]) == (head, True)
    assert got["git_diff_digest"] is not None


def test_one_revision_has_several_names() -> None:
    """A beginning of at least 7 digits is the same revision; a shorter or another one is not."""
    assert same_revision("0123abcdef", "0123ABC")
    assert not same_revision("0123abcdef", "0123ab")
    assert not same_revision("0123abcdef", "0123abd")


def test_in_a_container_the_images_fields_are_required(outside: pytest.MonkeyPatch, checkout: Path) -> None:
    """Inside a container what is not told of the image is missing; when all is told, the record is complete."""
    assert not in_container()
    outside.setenv("container", "podman")
    assert in_container()
    got = provenance(["mtb"], folder=checkout)
    assert got["missing_fields"] == ["build_revision", "image_ref", "image_id", "base_image"]
    told = {
        "MTB_BUILD_REVISION": "abc",
        "MTB_IMAGE_REF": "example/mtb:1",
        "MTB_IMAGE_ID": "sha256:12",
        "MTB_BASE_IMAGE": "debian:12",
    }
    for name, value in told.items():
        outside.setenv(name, value)
    got = provenance(["mtb"], folder=checkout)
    assert got["complete"] is True
    assert got["image_id"] == "sha256:12"
