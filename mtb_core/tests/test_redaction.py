"""What core writes is cleaned, without any plugin: texts, values by name, commands."""

from __future__ import annotations

import socket

import pytest

from mtb_core import redact, redact_command
from mtb_core.measure.redaction import redact_values


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/opt/venv/bin/mtb", "train", "--nproc", "2"], "mtb train --nproc 2"),
        (["mtb", "train", "--hub-token", "hunter2", "--seed", "1"], "mtb train --hub-token <hidden> --seed 1"),
        (["mtb", "train", "--api-key=hunter2"], "mtb train '--api-key=<hidden>'"),
        (["mtb", "train", "--sink", "x:password=hunter2"], "mtb train --sink 'x:password=<hidden>'"),
        (["mtb", "train", "--rdzv-endpoint", "node7:29500"], "mtb train --rdzv-endpoint <hidden>"),
        (["mtb", "train", "--data", "s3://me:hunter2@store/x y"], "mtb train --data 's3://<hidden>@store/x y'"),
        (["mtb", "data", "--tokenizer", "t.json"], "mtb data --tokenizer t.json"),
        (["mtb", "train", "--data", "/home/alice/my data"], "mtb train --data ~/'my data'"),
        (["mtb", "train", "--run-dir", "/rooted/x"], "mtb train --run-dir /rooted/x"),
        (["mtb", "train", "--nnodes", "1:2", "--x", "8:16:32"], "mtb train --nnodes 1:2 --x 8:16:32"),
        (["mtb", "train", "--x", "fe80::1"], "mtb train --x '<address>'"),
    ],
)
def test_commands_are_cleaned(words: list[str], shown: str) -> None:
    """A recorded command can be typed again, and holds no secret, address or home folder."""
    assert redact_command(words) == shown


def test_host_name_in_a_command_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host's name is hidden as a word of its own, long and short, and nowhere else."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu7.example.org")
    got = redact_command(["mtb", "train", "--data", "/data/gpu7/x", "--run-dir", "gpu7.example.org", "--seed", "gpu77"])
    assert got == "mtb train --data '/data/<host>/x' --run-dir '<host>' --seed gpu77"


def test_ordinary_text_is_left_alone() -> None:
    """Versions, times and paths that hold nothing private stay as they are."""
    for text in ("2.13.0", "12:30:45", "/data/set", "max_split_size_mb:128", "NCCL_ALGO=Ring"):
        assert redact(text) == text


def test_values_of_secret_names_are_hidden() -> None:
    """By name at any depth; other texts are cleaned, other values stay."""
    got = redact_values({"hub_token": "hunter2", "a": {"password": "hunter2", "n": 3}, "paths": ["/home/alice/x", 1]})
    assert got == {"hub_token": "<hidden>", "a": {"password": "<hidden>", "n": 3}, "paths": ["~/x", 1]}
