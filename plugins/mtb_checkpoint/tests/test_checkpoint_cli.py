"""Tests of mtb_checkpoint.command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mtb_checkpoint.command import checkpoint
from mtb_core.api.errors import CheckFailed, ConfigError, MtbError
from mtb_core.ckpt.manager import CheckpointManager
from mtb_core.tests.ckpt_ranks import Training, resealed, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with steps 1 and 2, of which 1 is not to be changed, and a third that is incomplete."""
    folder = tmp_path_factory.mktemp("c")
    saved(folder, (1, 2))
    (folder / "step_00000003").mkdir()
    return folder


def run(*args, code=0):
    """Standard output of a command that ends with `code`."""
    result = CliRunner().invoke(checkpoint, [str(a) for a in args])
    if isinstance(result.exception, MtbError):
        assert result.exception.exit_code == code, result.exception
        return result.stdout, str(result.exception)
    assert result.exit_code == code, result.output
    return result.stdout, ""


def parsed(*args, code=0):
    out, _ = run(*args, "--json", code=code)
    return json.loads(out, parse_constant=pytest.fail)


def test_list(folder):
    """All steps are listed, the incomplete one as such."""
    listed = parsed("list", folder)
    assert [(c["step"], c["ready"], c["latest"]) for c in listed["checkpoints"]] == [
        (1, True, False),
        (2, True, True),
        (3, False, False),
    ]
    first = listed["checkpoints"][0]
    assert (first["strategy"], first["world_size"], first["deterministic"]) == ("single", 1, True)
    assert first["size_bytes"] > 1000
    assert first["age_s"] >= 0
    out, _ = run("list", folder)
    assert "2 (latest)" in out
    assert "NO" in out


def test_list_of_nothing(tmp_path):
    """An empty folder is no error."""
    assert "no checkpoints" in run("list", tmp_path)[0]


def test_show(folder):
    """Metadata and every tensor with shape, dtype, placement and size."""
    shown = parsed("show", folder / "step_00000001")
    weight = next(t for t in shown["tensors"] if t["name"] == "model/0.weight")
    assert (weight["dtype"], weight["shape"], weight["placement"], weight["size_bytes"]) == (
        "float32",
        [7, 5],
        "whole",
        140,
    )
    assert shown["metadata"]["samples_seen"] == 4
    out, _ = run("show", folder / "step_00000001")
    assert "model/0.weight" in out
    assert "7x5" in out


def test_verify_one(folder):
    """A good checkpoint is exit 0, an incomplete one exit 1 with the file named; JSON in both cases."""
    sound = parsed("verify", folder / "step_00000001")
    assert (sound["ok"], sound["benchmark"], sound["schema_version"]) == (True, "checkpoint_verification", 1)
    found = parsed("verify", folder / "step_00000003", code=1)
    assert [p["file"] for p in found["problems"]] == ["READY"]
    assert "READY: it is missing" in run("verify", folder / "step_00000003", code=1)[1]


def test_verify_a_folder_of_checkpoints(folder):
    """A folder of checkpoints is a usage error that names them."""
    assert "step_00000001, step_00000002, step_00000003" in run("verify", folder, code=2)[1]


def test_verify_two(folder, tmp_path):
    """The same state is exit 0; another is exit 1, with the JSON written to the file too."""
    one, two = folder / "step_00000001", folder / "step_00000002"
    assert parsed("verify", one, one)["exact_match"] is True
    result = parsed("verify", one, two, "--output", tmp_path / "o.json", code=1)
    assert result == json.loads((tmp_path / "o.json").read_text())
    assert (result["exact_match"], result["matches"]) == (False, False)
    assert {"digests", "left_deterministic", "right_deterministic", "reasons"} <= result.keys()
    out, error = run("verify", one, two, code=1)
    assert "not the same to the bit" in out
    assert "train_state: global_step differs" in error


def test_verify_two_damaged(folder):
    """A damaged side ends the comparison with the file named, in the JSON as well."""
    result = parsed("verify", folder / "step_00000001", folder / "step_00000003", code=1)
    assert (result["exact_match"], result["matches"], result["digests"]) == (False, False, None)
    assert "step_00000003/READY: it is missing" in result["reasons"][0]


def test_tolerance_needs_two(folder):
    """--tolerance alone makes no sense."""
    assert "--tolerance" in run("verify", folder / "step_00000001", "--tolerance", "1", code=2)[1]


def test_prune(tmp_path):
    """Old ones go; a dry run only says so."""
    saved(tmp_path, (1, 2, 3), keep_last=0)
    assert parsed("prune", tmp_path, "--keep-last", 1, "--dry-run")["removed"] == ["step_00000001", "step_00000002"]
    assert "Removed step_00000001." in run("prune", tmp_path, "--keep-last", 2)[0]
    assert "Nothing to remove" in run("prune", tmp_path, "--keep-last", 2)[0]


def test_prune_tells_what_is_left(tmp_path, monkeypatch):
    """A checkpoint that the system does not let go is not called removed, and the command fails."""
    saved(tmp_path, (1, 2), keep_last=0)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("mtb_core.ckpt.files.rename", refuse)
    out, err = run("prune", tmp_path, "--keep-last", 1, "--json", code=3)
    assert json.loads(out)["removed"] == []
    assert "step_00000001 in" in err
    assert (tmp_path / "step_00000001").is_dir()


def test_export(folder, tmp_path):
    """Weights are written, and the files named; sizes take units."""
    run("export", folder / "step_00000001", "--output", tmp_path / "w.safetensors")
    assert (tmp_path / "w.safetensors").stat().st_size > 200
    out, _ = run("export", folder / "step_00000001", "--output", tmp_path / "d", "--max-shard-size", "1K")
    assert "model.safetensors.index.json" in out
    assert (
        CliRunner().invoke(checkpoint, ["export", str(folder), "--output", "x", "--max-shard-size", "0"]).exit_code == 2
    )
    assert "is a folder of checkpoints" in run("export", folder, "--output", tmp_path / "x", code=2)[1]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from mtb_checkpoint.command import checkpoint
checkpoint(sys.argv[1:], standalone_mode=False)
assert "torch" not in sys.modules
"""


def test_no_torch(folder):
    """All of it works without importing torch, in a process with 1 GiB of address space."""
    path = folder / "step_00000001"
    for args in (["list", folder], ["show", path], ["verify", path], ["verify", path, path]):
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, *map(str, args)],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_errors_are_of_the_right_kind():
    """What does not hold is exit 1, what is wrongly asked exit 2."""
    assert (CheckFailed.exit_code, ConfigError.exit_code) == (1, 2)


def forged(folder, change):
    """Publish a checkpoint in `folder` and change its manifest, with a READY that fits."""
    saved(folder)
    path = folder / "step_00000001"
    resealed(path, change)
    return path


def test_list_with_odd_entries(tmp_path, monkeypatch):
    """A link, a file and an unreadable step are listed with what is wrong; the others as ever. No link is followed."""
    saved(tmp_path, (1, 2))
    (tmp_path / "step_00000013").symlink_to("/")
    (tmp_path / "step_00000014").touch()
    (tmp_path / "step_00000002" / "more").symlink_to("/")
    is_file = Path.is_file

    def refused(path, **kwargs):
        if path.parent.name == "step_00000001":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path, **kwargs)

    monkeypatch.setattr(Path, "is_file", refused)
    rows = {row["step"]: row for row in parsed("list", tmp_path)["checkpoints"]}
    assert {step: row["ready"] for step, row in rows.items()} == {1: False, 2: True, 13: False, 14: False}
    assert rows[2]["problem"] is None
    assert rows[1]["problem"] == "Permission denied"
    assert "symbolic link" in rows[13]["problem"]
    assert rows[13]["size_bytes"] == 0
    assert rows[2]["size_bytes"] < 100_000
    assert "step_00000013: it is a symbolic link" in run("list", tmp_path)[0]


def test_fifo_as_pointer(tmp_path):
    """List and prune do not wait for somebody to write into a FIFO."""
    saved(tmp_path, (1, 2))
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    assert parsed("list", tmp_path)["latest"] is None
    assert parsed("prune", tmp_path, "--keep-last", 1)["removed"] == ["step_00000001"]


def test_stray_file_of_an_older_format(tmp_path):
    """A metadata.json in a checkpoint of the present format does not spare it the check before a comparison."""
    for name in ("a", "b"):
        saved(tmp_path / name)
    left, right = (tmp_path / name / "step_00000001" for name in ("a", "b"))
    (right / "metadata.json").write_text("{}")
    result = parsed("verify", left, right, code=1)
    assert "metadata.json: it does not belong there" in result["reasons"][0]


def test_output_that_cannot_be_written(folder, tmp_path, monkeypatch):
    """An output that cannot be written, or lies in a checkpoint, is wrong usage, told in a sentence."""
    path = folder / "step_00000001"
    (tmp_path / "file").touch()
    for command in ("verify", "export"):
        assert "cannot be written: " in run(command, path, "--output", tmp_path / "file" / "x", code=2)[1]
        for place in (path / "x", path / "more" / "x"):
            assert "lies in the checkpoint" in run(command, path, "--output", place, code=2)[1]
    sharded = ("--output", path / "more", "--max-shard-size", "1M")
    assert "lies in the checkpoint" in run("export", path, *sharded, code=2)[1]
    assert parsed("verify", path)["ok"] is True
    # Found out first: to verify may take long.
    monkeypatch.setattr("mtb_checkpoint.verify.verify_checkpoint", lambda _: pytest.fail("verified in vain"))
    assert "cannot be written: " in run("verify", path, "--output", tmp_path / "file" / "x", code=2)[1]


def test_link_to_a_checkpoint(folder, tmp_path):
    """A link that is named stands for the checkpoint it leads to, in every command."""
    link = tmp_path / "best"
    link.symlink_to(folder / "step_00000001")
    assert parsed("verify", link)["ok"] is True
    assert parsed("show", link)["path"] == str(folder / "step_00000001")
    assert parsed("verify", link, folder / "step_00000001")["exact_match"] is True
    training = Training()
    assert training.load(CheckpointManager(folder), link).step == 1


def test_text_for_a_terminal(tmp_path):
    """Control characters in a manifest are escaped when shown."""
    path = forged(tmp_path, lambda m: m.update(strategy="x\x1b[2J", note={"a": "\x7f"}))
    for args in (("show", path), ("list", tmp_path)):
        out, _ = run(*args)
        assert "x\\x1b[2J" in out
        assert not {"\x1b", "\x7f"} & {*out}
    (path / "\x1b[2J").touch()
    assert "\\x1b[2J: it does not belong there" in run("verify", path, code=1)[1]


def test_show_of_a_manifest_without_values(tmp_path):
    """Show names the value that is missing."""
    assert "'config' is missing" in run("show", forged(tmp_path, lambda m: m.pop("config")), code=3)[1]
