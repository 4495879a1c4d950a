"""Two launchers that meet at an endpoint, as on two nodes with a file system in common."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).parent / "models" / "faulty.py"


def train_on_two_nodes(folder: Path, *arguments: str) -> None:
    """`mtb train ARGUMENTS` with one rank on each node, in `folder`; both must end well."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "mtb_core", "train", "--strategy", "ddp", "--device", "cpu", "--seq-length", "8"]
    command += ["--d-model", "16", "--steps", "3", "--nnodes", "2", "--rdzv-endpoint", endpoint, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    nodes = [subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for node in nodes:
        _, errors = node.communicate()
        assert node.returncode == 0, errors


@pytest.mark.slow
def test_logs_are_in_the_run_folder(tmp_path: Path) -> None:
    """Also where rank 0 chose the folder, after the ranks began; nothing else is left."""
    train_on_two_nodes(tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "result.json").read_text())["world_size"] == 2
    assert sorted(p.name for p in (folder / "logs").iterdir()) == ["rank_00000.log", "rank_00001.log"]


@pytest.mark.slow
def test_a_restart_goes_on_in_the_run_folder(tmp_path: Path) -> None:
    """The folder that the first attempt made is no other run's."""
    train_on_two_nodes(tmp_path, "--model", f"{MODELS}:RaisesOnce", "--run-dir", "run", "--max-restarts", "1")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["runtime"]["restarts"] == 1
    assert "boom-r1" in (tmp_path / "run" / "logs" / "rank_00001.log").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
