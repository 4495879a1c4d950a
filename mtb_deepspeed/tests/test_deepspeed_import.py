"""What importing and using DeepSpeed must not do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CODE = """
import json, os, sys
from mtb_core import TrainConfig, run

def opened():
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {os.readlink(path) for path in paths if os.path.islink(path)}  # the folder's own is closed again

config = TrainConfig(strategy="deepspeed", strategy_opt={"stage": 3, "offload_optimizer": "cpu"}, steps=1,
    warmup_steps=0, device="cpu", seq_length=4, vocab_size=16, d_model=8, n_heads=1, n_layers=1, run_dir="run")
result = run(config, quiet=True)
print(json.dumps([result.exit_reason, "torch._inductor" in sys.modules, sorted(opened())]))
"""


def test_nothing_is_compiled_and_nothing_left_open(tmp_path: Path) -> None:
    """A whole run asks no compiler, not even whether it is there; imports none of torch's; leaves no file open."""
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\nexit 1\n")
    compiler.chmod(0o755)
    for name in ("gcc", "g++", "c++", "nvcc", "ninja"):
        (tmp_path / name).symlink_to(compiler)
    search = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": search, "CC": str(compiler), "CXX": str(compiler)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    reason, compiles, opened = json.loads(done.stdout)
    assert reason == "done"
    assert not compiles
    assert not [name for name in opened if name.startswith("/") and not name.startswith("/dev/")], opened
    assert not (tmp_path / "asked").exists()


def test_a_stream_that_was_closed_since(tmp_path: Path) -> None:
    """DeepSpeed's logger holds the stream of its first import; a later run of the process has another one."""
    code = """
import io, sys
from mtb_deepspeed.engine import import_deepspeed
former, sys.stderr = sys.stderr, io.TextIOWrapper(io.BytesIO())
import_deepspeed("cpu")
sys.stderr.close()
sys.stderr = former
import_deepspeed("cpu")
print("imported")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "imported\n", done.stderr
