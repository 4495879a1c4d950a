"""What must not be recorded is found wherever it is written, and a run that wrote it fails."""

from __future__ import annotations

import gzip
import json
import os
import socket
from pathlib import Path

import pytest

from mtb_core import TrainConfig, hookimpl, load_config, redact, run
from mtb_evidence import audit, audit_folder, private_details

SIZE = {"seq_length": 8, "d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 64, "steps": 1, "warmup_steps": 0}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"gpu": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"}', "a GPU's UUID"),
        ('{"https_proxy": "http://proxy:3128"}', "a proxy"),
        ("HTTP_PROXY=http://p:1", "a proxy"),
        ('"data": "s3://me:hunter2@store/x"', "a credential in a URL"),
        (f"token hf_{'a' * 34}", "a credential"),
        ("-----BEGIN RSA PRIVATE KEY-----", "a credential"),
        ("Authorization: Bearer abcdefghijklmnop1234", "a credential"),
        ('"/home/alice/data"', "a home folder"),
        ("cd /root/work", "a home folder"),
        ("cd /root", "a home folder"),
        ('{"home": "/root"}', "a home folder"),
        ("/nfs/home/alice/data", "a home folder"),
        ("/mnt/home/alice", "a home folder"),
        (r"C:\Users\alice\data", "a home folder"),
        (r'{"path": "C:\\Users\\alice"}', "a home folder"),
        ("db_password=hunter2", "a credential"),
        ('{"password": "hunter2"}', "a credential"),
        ("export CLIENT_SECRET_VALUE=0a1b2c3d", "a credential"),
        ("WANDB_API_KEY=0a1b2c3d", "a credential"),
        ("SIGNING_KEY: 0a1b2c3d", "a credential"),
        ("aws_secret_access_key = 0a1b2c3d", "a credential"),
        ("Authorization: Basic YWxpY2U6aHVudGVyMg==", "a credential"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-_1", "a credential"),
        ("connected to 10.1.2.3:29500", "a network address"),
        ('"peer": "192.168.0.7"', "a network address"),
        ("listening on [2001:db8::17]:80", "a network address"),
        ("inet6 fe80::1c2b:3d4e", "a network address"),
    ],
)
def test_each_kind_is_found(text: str, kind: str) -> None:
    """Each kind by its name; the found text is not repeated."""
    assert private_details(text, {}) == [kind]


@pytest.mark.parametrize(
    "text",
    [
        '{"tokens_per_sec": 1.0, "tokens_seen": 5}',
        "mtb train --data ~/x --run-dir runs/a",
        "/data/home/x and /rooted/y and ~/z",
        "torch 2.13.0, NVIDIA A100-SXM4-40GB, MIG 1g",
        "docs at https://pytorch.org/docs/stable/x.html",
        "<hidden>@store, http://<hidden>@x",
        "/rooted /root.d /root-fs",
        "listening on 127.0.0.1:29500 and 0.0.0.0, ::1",
        "nvidia-curand==10.4.0.35 cudnn version 9.19.1.5, cuDNN: 9.1.0.70",
        "12:30:45 aten::add c10d::add 2026-11-29T20:22:47.121+00:00",
        'password=<hidden> {"password": null} api_key=$KEY secret: ""',
        '{"key": "abcdefgh", "CACHE_KEYS": 123456, "cache_key": "abcdefgh", "tokens_per_sec": 123456}',
        r"C:\Windows\x and ~\y",
        "sha256:1f57418aedd9a4d0d3a59646619e1d4f82cacc33817247cead4f749e1f452d4b",
    ],
)
def test_ordinary_text_is_none(text: str) -> None:
    """What a result is made of raises no alarm."""
    assert private_details(text, {}) == []


@pytest.mark.parametrize(
    ("host", "text", "seen"),
    [
        ("gpu-node-17", "ran on gpu-node-17 today", True),
        ("gpu-node-17.example.org", "gpu-node-17:29500", True),
        ("gpu-node-17", "gpu-node-170", False),
        ("gpu-node-17", "at GPU-Node-17", True),
        ("GPU-Node-17", "at gpu-node-17.example.org", True),
        ("vm", '{"vm": 1, "a": "some vm"}', False),
        ("vm", '{"strategy": "vm"}', False),
        ("vm", "tcp at vm:29500", True),
        ("vm", "tcp://vm/", True),
        ("localhost", "localhost:29500", False),
    ],
)
def test_host_names(monkeypatch: pytest.MonkeyPatch, host: str, text: str, seen: bool) -> None:
    """A host's name counts as a word; where it is an ordinary word, only where a host must be meant."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert (private_details(text, {}) == ["this host's name"]) is seen
    assert private_details(redact(text), {}) == []
    assert (redact(text) != text) is seen


def test_values_of_secret_variables() -> None:
    """What the environment holds as a secret or proxy is found in any form, and only its name is told."""
    environ = {
        "WANDB_API_KEY": "0a1b2c3d4e5f",
        "https_proxy": "http://proxy:3128",
        "TOKENIZER": "short",
        "LANG": "C.UTF-8",
    }
    text = "x0a1b2c3d4e5fx via http://proxy:3128 C.UTF-8"
    assert private_details(text, environ) == ["the value of the variable WANDB_API_KEY", "a proxy"]


def test_a_folder_file_by_file(tmp_path: Path) -> None:
    """Text and compressed text are searched to their end, binary files and named folders are not."""
    (tmp_path / "good.json").write_text("{}")
    (tmp_path / "bad.json").write_text(" " * (1 << 20) + "/home/alice/x")
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        file.write("/home/alice/x")
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)) + b"/home/alice/x")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank.log").write_text("/home/alice/x")
    expected = {"bad.json": ["a home folder"], "trace.json.gz": ["a home folder"]}
    assert audit_folder(tmp_path, skip=("logs",)) == expected
    assert set(audit_folder(tmp_path)) == {*expected, "logs/rank.log"}


@pytest.mark.parametrize("text", [b"\0/home/alice/x", "reading /home/alice/x".encode("utf-16")])
def test_text_with_nuls_is_text(tmp_path: Path, text: bytes) -> None:
    """A log with stray NULs and a UTF-16 file are searched like any other."""
    (tmp_path / "a.log").write_bytes(text)
    missed: dict[str, str] = {}
    assert audit_folder(tmp_path, passed_over=missed) == {"a.log": ["a home folder"]}
    assert missed == {}


def test_what_was_not_searched_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binary files, links, pipes, files beyond the limit and files that cannot be read, each with its reason."""
    monkeypatch.setattr(audit, "LIMIT_BYTES", 1 << 20)
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)))
    (tmp_path / "outside").symlink_to("/")
    (tmp_path / "link.txt").symlink_to("weights.bin")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken.gz").write_bytes(b"no gzip")
    with gzip.open(tmp_path / "cut.gz", "wb") as file:
        file.write(os.urandom(10000))
    (tmp_path / "cut.gz").write_bytes((tmp_path / "cut.gz").read_bytes()[:5000])
    (tmp_path / "large.txt").write_text(" " * ((1 << 20) + 1))
    (tmp_path / "whole.txt").write_text(" " * (1 << 20))
    missed: dict[str, str] = {}
    assert audit_folder(tmp_path, passed_over=missed) == {}
    assert {name: why.partition(":")[0] for name, why in missed.items()} == {
        "weights.bin": "it is binary",
        "outside": "it is a link",
        "link.txt": "it is a link",
        "pipe": "it is no regular file",
        "broken.gz": "it cannot be read",
        "cut.gz": "it cannot be read",
        "large.txt": audit.TRUNCATED,
    }


def test_homes_that_are_found_are_hidden_before() -> None:
    """What redaction leaves raises no alarm, so that a path in a setting does not fail its run."""
    for path in ("/nfs/home/alice/x", "/root", "/root/x", r"C:\Users\alice\x", "/mnt/home/alice"):
        assert private_details(redact(path), {}) == []
        assert redact(path).startswith("~")


class Leak:
    """A run plugin that writes a home folder into the run's."""

    @hookimpl
    def mtb_run_started(self, info) -> None:
        (info.folder / "more.json").write_text('{"home": "/home/alice"}')


def test_a_run_that_recorded_too_much_is_not_publishable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The training is done and stays so; the result, a warning and result.json say which file must not be handed on."""
    config = TrainConfig(device="cpu", sink=("jsonl",), run_dir=str(tmp_path / "run"), **SIZE)
    result = run(config, quiet=True, plugins={"leak": Leak})
    assert (result.exit_code, result.exit_reason, result.execution_complete) == (0, "done", True)
    (reason,) = result.unpublishable_reasons
    assert "more.json tells who ran it or where (a home folder)" in reason
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (written["publishable"], written["unpublishable_reasons"]) == (False, [reason])
    assert "alice" not in json.dumps(written)
    assert "must not be handed on" in " ".join(capsys.readouterr().err.split())


def test_a_home_folder_of_ones_own_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths below the home folder are written as ~/, and the configuration still finds them."""
    home = tmp_path / "people" / "alice"
    (home / "text").mkdir(parents=True)
    (home / "text" / "a.txt").write_text("some words to learn from " * 40)
    monkeypatch.setenv("HOME", str(home))
    config = TrainConfig(
        device="cpu", sink=("jsonl",), run_dir=str(home / "run"), data=str(home / "text"), **SIZE | {"vocab_size": None}
    )
    run(config, quiet=True).check()
    for name in ("config.toml", "result.json"):
        assert "alice" not in (home / "run" / name).read_text()
    assert load_config(file=home / "run" / "config.toml").data == str(home / "text")
