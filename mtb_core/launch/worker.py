"""Making a `Worker` of a process that our launcher did not start."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from mtb_core.api.errors import ConfigError
from mtb_core.api.layout import World
from mtb_core.ranks.signals import StopFlag
from mtb_core.ranks.worker import Worker, available_cores


def external_launcher(environment: Mapping[str, str] | None = None) -> Literal["torchrun", "slurm"] | None:
    """Launcher that started this process as a rank, judged by the environment; None: this process launches its own ranks.

    Under Slurm only a task of a step counts (not the batch script itself), and only where MASTER_ADDR and
    MASTER_PORT say where ranks meet.
    """
    env = os.environ if environment is None else environment
    if all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return "torchrun"
    if all(name in env for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT")):
        return "slurm"
    return None


def world_of(environment: Mapping[str, str] | None = None) -> World:
    """The world that an external launcher's environment describes.

    Raises:
        ConfigError: the environment is incomplete or contradicts itself.
    """
    env = os.environ if environment is None else environment
    launcher = external_launcher(env)
    if launcher is None:
        msg = (
            "This process was not started as a rank: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set. "
            "Start it with torchrun, or let `mtb train --nproc N` start the ranks."
        )
        raise ConfigError(msg)
    if launcher == "torchrun":
        size = _number(env, "WORLD_SIZE")
        local = _number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else size
    else:
        size = _number(env, "SLURM_NTASKS")
        local = _slurm_tasks_per_node(env, size)
    return World(size, local)


@contextmanager
def attach() -> Iterator[Worker]:
    """This process as one rank of a world that torchrun or Slurm started; stop signals are noted while open."""
    env = os.environ
    world = world_of(env)
    launcher = external_launcher(env)
    assert launcher is not None
    slurm = launcher == "slurm"
    rank = _number(env, "SLURM_PROCID" if slurm else "RANK")
    if slurm:
        local_rank = _number(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else rank % world.local_size
    else:
        local_rank = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank
    if not 0 <= rank < world.size:
        msg = f"This process is rank {rank} of {world.size}, by {launcher}'s environment; ranks go from 0 to size - 1."
        raise ConfigError(msg)
    restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    limit_threads(world.local_size)
    with StopFlag().catching() as stop:
        yield Worker(rank, local_rank, world, stop, launcher, restarts, attempt=str(restarts))


@contextmanager
def alone() -> Iterator[Worker]:
    """This process as the only rank; stop signals are noted while open, a second Ctrl-C interrupts."""
    with StopFlag().catching(second_interrupt=True) as stop:
        yield Worker(0, 0, World(1, 1), stop, "self")


def limit_threads(local_size: int) -> None:
    """Share the cores this process may use among the ranks of the node, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        import torch  # noqa: PLC0415  (torch is imported when it is used)

        torch.set_num_threads(threads_for(local_size))


def threads_for(local_size: int) -> int:
    """Threads that each of `local_size` ranks of a node computes with."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdigit() else max(1, available_cores() // local_size)


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except (KeyError, ValueError):
        msg = f"The environment variable {name} is {env.get(name)!r}; the launcher must set it to a whole number."
        raise ConfigError(msg) from None


def _slurm_tasks_per_node(env: Mapping[str, str], size: int) -> int:
    """Tasks on a node; all nodes must have the same number. Slurm writes ``2(x3)`` for three nodes of two."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size)
    counts = {int(n) for n in re.findall(r"(?:^|,)(\d+)", text)}
    if len(counts) != 1:
        msg = f"Slurm spread the tasks as {text!r}; every node needs the same number: use --ntasks-per-node."
        raise ConfigError(msg)
    return counts.pop()
