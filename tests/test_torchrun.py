"""The same command under torchrun: every process is one rank of it, and they agree on what one must decide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtb_core.ckpt.catalog import newest

MODELS = Path(__file__).parent / "models" / "faulty.py"

#: Started by torchrun in place of `python -m mtb_core`: rank 1 is late and lives in another time zone.
RANK = """
import os, sys, time
if os.environ["RANK"] == "1":
    os.environ["TZ"] = "Asia/Tokyo"
    time.sleep(1.5)
from mtb_core.cli import main
sys.exit(main())
"""


def torchrun(folder: Path, *arguments: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """`mtb train ARGUMENTS` on two ranks under torchrun, in `folder`."""
    script = folder / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), str(script)]
    small = ["train", "--strategy", "ddp", "--device", "cpu", "--seq-length", "8", "--d-model", "16", "--steps", "3"]
    return subprocess.run(
        [*command, *small, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_ranks_share_one_run_folder(tmp_path: Path) -> None:
    """Without --run-dir there is one folder, decided by one rank; --json is printed once; checkpoints are whole."""
    done = torchrun(tmp_path, "--json", "--save-every", "2", "--checkpoint-dir", "saved")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["world_size"] == 2
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(p.name for p in (folder / "metrics").iterdir()) == ["rank_00000.jsonl", "rank_00001.jsonl"]
    assert json.loads((folder / "result.json").read_text())["exit_reason"] == "done"
    found = newest(tmp_path / "saved")
    assert found is not None
    assert sorted(p.name for p in (found / "rng").iterdir()) == ["rank_00000.json", "rank_00001.json"]


def test_a_failed_rank_is_named(tmp_path: Path) -> None:
    """Torchrun leaves with 1, and what it shows begins with the first cause."""
    done = torchrun(tmp_path, "--model", f"{MODELS}:Raises")
    assert done.returncode == 1
    assert "boom-r1" in done.stderr


@pytest.mark.slow
def test_a_restart_goes_on_in_the_run_folder(tmp_path: Path) -> None:
    """The folder that the first attempt made is no other run's."""
    done = torchrun(tmp_path, "--model", f"{MODELS}:RaisesOnce", "--run-dir", "run", restarts=1)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["runtime"]["restarts"] == 1
