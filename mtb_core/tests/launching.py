"""For tests of launching: a launcher in a process of its own, forked so that torch need not be imported again."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch

import mtb_launcher.agent  # noqa: F401  (torch is there before forking)
from mtb_core.api import Layout, Plan
from mtb_core.launch import LaunchSpec
from mtb_core.ranks.context import open_ranks
from mtb_launcher import launch

FORK = multiprocessing.get_context("fork")


def plan_for(world_size, **kwargs):
    """A data-parallel plan."""
    return Plan(Layout((("dp", world_size),)), **kwargs)


def run_ranks(entry, log_dir, payload=None, nproc=2, start_method="fork", **kwargs):
    """Launch `entry` from this process, forked unless said otherwise."""
    return launch(
        LaunchSpec(entry=entry, payload=payload, nproc=nproc, log_dir=log_dir, start_method=start_method, **kwargs)
    )


def reduce(_payload, worker):
    with open_ranks(worker, plan_for(2), device="cpu"):
        x = torch.ones(1)
        torch.distributed.all_reduce(x)
        return x.item()


class Launcher:
    """A launcher in its own process group; ranks and it leave marks (files) in `folder`."""

    def __init__(self, entry, folder, nproc=2, **kwargs):
        self.folder = Path(folder)
        self._receive, send = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=_launcher, args=(entry, self.folder, nproc, send, kwargs))
        self.process.start()
        send.close()
        self.nproc = nproc

    def workers(self):
        """Process ids of the ranks, once all have left their mark."""
        return [int(read_mark(self.folder / f"ready{rank}")) for rank in range(self.nproc)]

    def ended(self):
        """Whether `launch` has returned, or the launcher died."""
        return self._receive.poll() or not self.process.is_alive()

    def outcome(self):
        """What `launch` returned."""
        out = self._receive.recv()
        self.process.join()
        return out

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.join()


def _launcher(entry, folder, nproc, send, kwargs):
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once the launch is over, it must still tell
    send.send(run_ranks(entry, folder, folder, nproc, **kwargs))


def mark(path, text=""):
    """Leave a file that appears as a whole."""
    part = Path(f"{path}.part{os.getpid()}")
    part.write_text(str(text))
    part.rename(path)


def read_mark(path):
    """The text of a mark, waited for."""
    wait_until(Path(path).exists)
    return Path(path).read_text()


def wait_until(condition, timeout=240):
    """Poll until `condition()` holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def gone(pid):
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until_stopped(folder, worker):
    """An entry: be ready, then wait for a stop signal; returns its name."""
    mark(folder / f"ready{worker.rank}", os.getpid())
    while worker.stop.requested is None:
        time.sleep(0.005)
    return worker.stop.requested


def for_ever(folder, worker):
    """An entry that ignores all requests to stop. From the moment of its mark on, its innermost Python call is this one."""
    part = folder / f"part{worker.rank}"
    part.write_text(str(os.getpid()))
    os.rename(part, folder / f"ready{worker.rank}")  # noqa: PTH104  (the method would be a call of Python's)
    while True:
        time.sleep(0.05)
