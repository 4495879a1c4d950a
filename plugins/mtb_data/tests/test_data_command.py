"""The command `mtb data`."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from mtb_core import CheckFailed, ConfigError
from mtb_core.cli import main
from mtb_data.command import data

SMALL = (
    "--device cpu --quiet --steps 1 --warmup-steps 0 --seq-length 4 --d-model 8 --n-heads 2 --n-layers 1 --batch-size 2"
)


def invoke(*args, fails=None):
    """Standard output of the command; errors for people come out as they are, since `mtb` itself shows them."""
    result = CliRunner().invoke(data, [str(arg) for arg in args])
    if fails is None:
        assert result.exception is None, result.output
    else:
        assert isinstance(result.exception, fails)
    return result.stdout


@pytest.fixture
def prepared(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some text")
    return text, tmp_path / "out", invoke("prepare", text, "--output", tmp_path / "out")


def test_prepare(prepared):
    """`prepare` writes the token file and says what is in it and what to do next."""
    _, folder, output = prepared

    assert (folder / "tokens.mtb").is_file()
    assert f"{folder}: 9 tokens of 1 document, vocabulary 256 (bytes), uint8" in output
    assert f"mtb train --data {folder}" in output


def test_info_json(prepared):
    """`info --json` prints one strict JSON document and nothing else."""
    text, folder, _ = prepared
    values = json.loads(invoke("info", folder, "--json"))

    assert (values["tokens"], values["tokenizer"], values["separator"], values["digest_ok"]) == (9, "bytes", 0, True)
    assert json.loads(invoke("info", text, "--json"))["kind"] == "text_file"


def test_info(prepared):
    """`info` shows people the same."""
    lines = dict(line.split(maxsplit=1) for line in invoke("info", prepared[1]).splitlines())

    assert (lines["tokens"], lines["digest_ok"]) == ("9", "yes")


def test_damage_is_found(prepared):
    """`info` shows a file whose tokens have changed, and fails as a check does."""
    file = prepared[1] / "tokens.mtb"
    file.write_bytes(file.read_bytes()[:-1] + b"!")

    assert json.loads(invoke("info", file, "--json", fails=CheckFailed))["digest_ok"] is False


def test_errors_are_the_library_s(tmp_path):
    """Wrong paths are reported in one place, the library."""
    invoke("prepare", tmp_path / "gone", "--output", tmp_path, fails=ConfigError)
    invoke("info", tmp_path / "gone", fails=ConfigError)


def test_help_is_cheap():
    """Neither the group nor its help imports torch or numpy."""
    code = (
        "import sys; from mtb_data.command import data\n"
        "for args in (['--help'], ['prepare', '--help'], ['info', '--help']):\n"
        "    data.main(args, standalone_mode=False)\n"
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)

    assert done.stdout.splitlines()[-1] == "[]"


def test_training_needs_nothing_of_this(prepared, tmp_path, monkeypatch, capsys):
    """Without this distribution a prepared folder and a text are trained on, to the same loss; `mtb data` names it."""
    monkeypatch.setenv("MTB_DISABLE_PLUGINS", "mtb-data")
    monkeypatch.chdir(tmp_path)
    losses = []
    for path in prepared[:2]:
        assert main(["train", *SMALL.split(), "--json", "--data", str(path)]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == losses[1]

    assert main(["data", "info", str(prepared[1])]) == 2
    assert "no command 'data' now: plugin 'data' (mtb-data" in capsys.readouterr().err
