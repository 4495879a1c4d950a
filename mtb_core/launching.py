"""`run_ranks`: a function of your own on all ranks, for commands that measure or check something without training."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs

from mtb_core.api.errors import ConfigError
from mtb_core.api.layout import Layout, World
from mtb_core.api.values import Plan, RankContext
from mtb_core.launch.spec import ExitReason, LaunchSpec, start_ranks
from mtb_core.launch.worker import external_launcher, world_of
from mtb_core.ranks.context import open_ranks
from mtb_core.ranks.failures import Failure
from mtb_core.ranks.network import check_interfaces
from mtb_core.ranks.worker import Worker
from mtb_core.registry.discovery import discover

RanksMain = Callable[[Any, RankContext, Worker], Any]


@attrs.frozen
class RanksOutcome:
    """Outcome of `run_ranks`.

    Attributes:
        exit_reason: ``"done"``, ``"stopped"`` (SIGTERM), ``"interrupted"`` (Ctrl-C) or ``"failed"``.
        value: what rank 0 returned; None if it did not return, and in processes of other external ranks.
        failure: the first cause, where the ranks failed.
    """

    exit_reason: ExitReason
    value: Any = None
    failure: Failure | None = None


@attrs.frozen
class _Work:
    main: RanksMain
    payload: Any
    layout: Layout
    device: str
    backend: str
    timeout: timedelta | None


def run_ranks(
    main: RanksMain,
    payload: Any = None,
    *,
    nproc: int = 1,
    layout: Layout | None = None,
    device: str = "auto",
    backend: str = "auto",
    start_method: str = "auto",
    timeout: timedelta | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    on_line: Callable[[int, str], None] | None = None,
    debug: bool = False,
) -> RanksOutcome:
    """Call ``main(payload, ctx, worker)`` on every rank, inside a process group, and give back what rank 0 returns.

    Started plainly, `nproc` workers are launched and end with this process; one rank runs in this process. Started by
    torchrun or Slurm, this process is one rank of theirs, and `nproc` is not looked at. Whatever one rank raises ends
    all of them within seconds; the outcome names the first cause.

    Args:
        main: a function of a module; it must drop what communicates before it returns. ``worker.stop.requested`` tells
            that this rank was asked to stop (ranks must agree before they act on it), ``worker.progress(fields)``
            hands a small mapping to `on_progress`, best effort.
        payload: picklable, the same for all ranks.
        layout: arrangement of the ranks; ``ctx.mesh`` has its axes. None: one axis ``"ranks"``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        backend: ``"auto"``, ``"gloo"`` or ``"nccl"``.
        timeout: of collectives; None is torch's default.
        on_line: ``on_line(rank, line)`` for each line that a launched rank writes; None drops them.

    Raises:
        ConfigError: nothing was started: a wrong number of ranks, fewer CUDA devices than ranks of this machine, a
            wrong backend or network interface.
    """
    external = external_launcher() is not None
    world = world_of() if external else World(nproc, nproc)
    if world.size < 1:
        raise ConfigError(f"{nproc} ranks cannot be started; --nproc must be at least 1.")
    if backend == "nccl" and device == "cpu":
        raise ConfigError("--backend nccl needs a CUDA device, but --device is cpu; valid here: gloo.")
    _check_devices(device, backend, world.local_size)
    if world.size > 1:
        check_interfaces(device, backend)
    chosen = layout or Layout((("ranks", world.size),), {"ranks": "data"})
    if chosen.size != world.size:
        raise ConfigError(f"The layout {dict(chosen.axes)} has {chosen.size} ranks, but there are {world.size}.")
    work = _Work(main, payload, chosen, device, backend, timeout)
    here = external or world.size == 1
    with tempfile.TemporaryDirectory(prefix=f"mtb-{os.getpid()}-") as logs:
        outcome = start_ranks(
            LaunchSpec(
                entry=_on_rank,
                payload=work,
                nproc=nproc,
                start_method=start_method,
                log_dir=Path(logs),
                on_line=on_line,
                on_progress=on_progress,
                debug=debug,
            ),
            None if here else discover().launcher("local"),
        )
    return RanksOutcome(outcome.exit_reason, outcome.values.get(0), outcome.failure)


def _check_devices(device: str, backend: str, local_size: int) -> None:
    """Refuse ranks on CUDA that would lack a device; on ``auto`` a machine without any computes on its CPU.

    The number comes from NVML, so that CUDA stays untouched in this process, which may fork ranks. (Where NVML is
    missing torch asks CUDA itself, and ranks are better spawned.)
    """
    if device == "cpu":
        return
    import torch  # noqa: PLC0415  (torch is imported when it is used)

    count = torch.cuda.device_count()
    wanted = device == "cuda" or backend == "nccl"
    if count >= local_size or not (wanted or count):
        return
    asked = "--device cuda" if device == "cuda" else "--backend nccl" if backend == "nccl" else "--device auto"
    raise ConfigError(
        f"{asked} puts each rank on a CUDA device of its own, but this machine has {count} for {local_size} "
        f"rank{'' if local_size == 1 else 's'}. Start at most one rank per device, or use --device cpu with --backend gloo."
    )


def _on_rank(work: _Work, worker: Worker) -> Any:
    with open_ranks(worker, Plan(work.layout), device=work.device, backend=work.backend, timeout=work.timeout) as ctx:
        return work.main(work.payload, ctx, worker)
