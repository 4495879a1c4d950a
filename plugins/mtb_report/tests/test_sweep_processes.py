"""`mtb sweep` with real trainings: recorded, stopped in time, and none outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TINY = "[base]\nsteps = 2\nwarmup_steps = 0\nd_model = 8\nn_heads = 1\nn_layers = 1\nseq_length = 8\nbatch_size = 2\n"


def mtb(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mtb_core", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )


def test_a_real_sweep(tmp_path: Path) -> None:
    """A cell that trains and one that cannot: both recorded with command, exit code and digest; exit code 3; resumed."""
    (tmp_path / "s.toml").write_text(f"name = 's'\n{TINY}[matrix]\nstrategy = ['single', 'nosuch']\n")
    done = mtb(tmp_path, "sweep", "s.toml", "--run-dir", "out", "--json")
    assert done.returncode == 3, done.stderr
    good, bad = json.loads(done.stdout)["cells"]
    assert (good["status"], bad["status"], bad["failure_type"], bad["exit_code"]) == (
        "success",
        "failed",
        "configuration",
        2,
    )
    assert "nosuch" in bad["reason"]
    assert good["figures"]["step_time_ms"] > 0
    assert len(good["log_digest"]) == 64
    assert f"out/cells/{good['id']}/settings.toml" in good["command"]
    assert "[2/2]" in done.stderr
    again = mtb(tmp_path, "sweep", "s.toml", "--run-dir", "out")
    assert again.returncode == 3
    assert "[1/2]" not in again.stderr


def test_a_cell_without_enough_memory(tmp_path: Path) -> None:
    """A model larger than any address space is recorded as out of memory; that is an answer: exit code 0."""
    text = f"name = 's'\n{TINY}[matrix]\nvocab_size = [{2**40}]\n".replace("d_model = 8", "d_model = 64")
    (tmp_path / "s.toml").write_text(text)
    done = mtb(tmp_path, "sweep", "s.toml", "--run-dir", "out", "--json")
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert (cell["status"], cell["failure_type"], cell["exit_code"]) == ("oom", "host_oom", 3)
    assert cell["figures"]["step_time_ms"] is None


def test_a_cell_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    """It and its ranks are ended, and recorded as a timeout."""
    text = f"name = 's'\n{TINY}[matrix]\nsteps = [100000000]\nnproc = [2]\nstrategy = ['ddp']\n".replace(
        "steps = 2\n", ""
    )
    (tmp_path / "s.toml").write_text(text)
    done = mtb(tmp_path, "sweep", "s.toml", "--run-dir", "out", "--json", "--timeout-s", "4")
    assert done.returncode == 3, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert (cell["status"], cell["failure_type"]) == ("timeout", "timeout")
    assert not _processes_with(str(cell["id"]))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 4)])
def test_a_signal_ends_the_training_too(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The contract's exit code, no rank is left, and the interrupted cell is not recorded."""
    text = f"name = 's'\n{TINY}[matrix]\nsteps = [100000000]\n".replace("steps = 2\n", "")
    (tmp_path / "s.toml").write_text(text)
    words = [sys.executable, "-m", "mtb_core", "sweep", "s.toml", "--run-dir", "out"]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("out/cells/*/run/metrics/*.jsonl")):
        assert process.poll() is None
        os.sched_yield()
        time.sleep(0.05)
    (cell,) = (tmp_path / "out" / "cells").iterdir()
    assert _processes_with(cell.name)
    process.send_signal(number)
    assert process.wait() == code
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["counts"] == {"not_run": 1}
    assert not _processes_with(cell.name)


def test_a_sweep_that_is_killed_leaves_no_training(tmp_path: Path) -> None:
    """SIGKILL leaves it no time to stop anything; the training and its ranks end all the same."""
    text = f"name = 's'\n{TINY}[matrix]\nsteps = [100000000]\nnproc = [2]\nstrategy = ['ddp']\n"
    (tmp_path / "s.toml").write_text(text.replace("steps = 2\n", ""))
    words = [sys.executable, "-m", "mtb_core", "sweep", "s.toml", "--run-dir", "out"]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("out/cells/*/run/metrics/*.jsonl")):
        assert process.poll() is None
        os.sched_yield()
        time.sleep(0.05)
    (cell,) = (tmp_path / "out" / "cells").iterdir()
    assert _processes_with(cell.name)
    process.kill()
    process.wait()
    while _processes_with(cell.name):  # the test's time limit ends it where they stay
        time.sleep(0.05)


def _processes_with(word: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = file.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in text:
            found.append(text)
    return found
