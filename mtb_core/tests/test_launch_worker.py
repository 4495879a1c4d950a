import os
import signal
import subprocess
import sys

import pytest

from mtb_core.api import ConfigError, World
from mtb_core.launch.worker import alone, attach, external_launcher, threads_for, world_of

MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TORCHRUN = {**MEETING, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {**MEETING, "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}


@pytest.fixture
def environment(monkeypatch):
    """Sets variables; all that launchers set are unset before."""
    for name in [n for n in os.environ if n.startswith("SLURM_")] + list(TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return lambda values: [monkeypatch.setenv(n, v) for n, v in values.items()]


def test_plain_process_is_no_rank():
    """Without a launcher's variables, and in a Slurm batch script outside a step, a process is no rank."""
    assert external_launcher({}) is None
    assert external_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", **MEETING}) is None
    with pytest.raises(ConfigError, match="not started as a rank"):
        world_of({})


@pytest.mark.parametrize(("values", "launcher"), [(TORCHRUN, "torchrun"), (SLURM, "slurm")])
def test_attach_reads_the_environment(environment, values, launcher):
    """A rank started by torchrun or Slurm knows itself from the environment."""
    environment({**values, "SLURM_TASKS_PER_NODE": "2(x2)"})
    with attach() as worker:
        assert (worker.rank, worker.local_rank, worker.world) == (3, 1, World(4, 2))
        assert worker.launched_by == launcher
        worker.progress({"nobody": "listens"})


def test_attach_notes_signals(environment):
    """A signal while attached sets the flag; afterwards the former handlers are back."""
    environment(TORCHRUN)
    before = signal.getsignal(signal.SIGUSR1)
    with attach() as worker:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert worker.stop.requested == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("bad", [{"RANK": "x"}, {"RANK": "4"}, {"WORLD_SIZE": ""}])
def test_bad_environment_is_refused(environment, bad):
    """A rank that is no number, or outside the world, is refused with the value seen."""
    environment({**TORCHRUN, **bad})
    with pytest.raises(ConfigError), attach():
        pass


def test_uneven_slurm_nodes_are_refused():
    """Nodes with different numbers of tasks are refused."""
    with pytest.raises(ConfigError, match="ntasks-per-node"):
        world_of({**SLURM, "SLURM_TASKS_PER_NODE": "2,1"})


def test_alone_is_interrupted_by_the_second_ctrl_c():
    """In a single process the first Ctrl-C asks for a stop, the second one interrupts."""
    with alone() as worker:
        assert (worker.rank, worker.world, worker.launched_by) == (0, World(1, 1), "self")
        os.kill(os.getpid(), signal.SIGINT)
        assert worker.stop.requested == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_threads_share_the_cores(monkeypatch):
    """Ranks share a node's cores; OMP_NUM_THREADS wins."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("mtb_core.launch.worker.available_cores", lambda: 8)
    assert [threads_for(n) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads_for(2) == 5


SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from mtb_core.api import Layout, Plan
from mtb_core.launch.worker import attach
from mtb_core.ranks.context import open_ranks
from mtb_core.ranks.failures import PeerFailed

with attach() as worker:
    try:
        with open_ranks(worker, Plan(Layout((("dp", 2),))), device="cpu") as ctx:
            x = torch.ones(1)
            dist.all_reduce(x)
            print(f"rank {ctx.rank} sum {x.item()} by {worker.launched_by}", flush=True)
            if ctx.rank == 1:
                raise ValueError("boom-r1")
            dist.all_reduce(x)
    except PeerFailed as error:
        print(f"rank {worker.rank} says: {error}", flush=True)
        raise
"""


def test_under_torchrun(tmp_path):
    """A rank under torchrun joins the others; when one fails, the other one names it and torchrun shows its error."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "rank 0 sum 2.0 by torchrun" in done.stdout
    assert "rank 0 says: Rank 1 failed: ValueError: boom-r1" in done.stdout
    assert "ValueError: boom-r1" in done.stderr
