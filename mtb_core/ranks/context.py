"""The one place where a rank joins the others and leaves them again."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from mtb_core.api.errors import ConfigError, RunFailed
from mtb_core.api.layout import Layout
from mtb_core.api.values import Plan, RankContext

from .failures import Failure, PeerFailed, failure_of, record_failure, recorded_cause
from .network import single_node_interface
from .worker import Worker

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def open_ranks(
    worker: Worker, plan: Plan, *, device: str = "auto", backend: str = "auto", timeout: timedelta | None = None
) -> Iterator[RankContext]:
    """Join the other ranks; leave them when the block ends. Called once by every rank.

    Drop model, optimizer and whatever else communicates before the block ends: destroying a group while a wrapped
    model is alive can hang. When the block ends by an exception, ranks do not wait for each other; the exception is
    recorded for the others first.

    Args:
        worker: this rank.
        plan: the strategy's; its layout becomes the device mesh.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``; with ``"cpu"`` nothing touches CUDA.
        backend: ``"auto"``, ``"gloo"`` or ``"nccl"``.
        timeout: of collectives; None is torch's default.

    Raises:
        ConfigError: the backend does not work on the device.
        PeerFailed: this rank lost its peers, and the first cause is known.
        RunFailed: the ranks cannot meet, or the device is not there.
    """
    where = _device(device, worker)
    chosen = _backend(backend, where)  # also where none is needed: what was asked for must be possible
    if worker.world.size == 1 and not plan.process_group:
        yield RankContext(worker.rank, worker.local_rank, worker.world, where, None, plan.layout)
        return
    with single_node_interface(worker.world):
        store = _join(worker, where, chosen, timeout)
        try:
            mesh = _mesh(where, plan.layout)
            yield RankContext(
                worker.rank, worker.local_rank, worker.world, where, chosen, plan.layout, mesh=mesh, store=store
            )
            _leave()
        except BaseException as error:
            _leave_failed(worker, store, error)
            raise


def _device(asked: str, worker: Worker) -> str:
    if asked == "cpu":
        return "cpu"
    import torch  # noqa: PLC0415  (torch is imported when it is used)

    if asked == "auto" and not torch.cuda.is_available():
        return "cpu"
    count = torch.cuda.device_count()
    if worker.local_rank >= count:
        msg = (
            f"Rank {worker.rank} needs CUDA device {worker.local_rank}, but this machine has {count}. "
            "Start at most one rank per device, or use --device cpu."
        )
        raise RunFailed(msg, rank=worker.rank)
    torch.cuda.set_device(worker.local_rank)
    return f"cuda:{worker.local_rank}"


def _backend(asked: str, device: str) -> str:
    if asked == "auto":
        return "gloo" if device == "cpu" else "nccl"
    if asked == "nccl" and device == "cpu":
        msg = "--backend nccl needs a CUDA device, but the ranks run on cpu; valid here: gloo."
        raise ConfigError(msg)
    return asked


def _join(worker: Worker, device: str, backend: str, timeout: timedelta | None) -> Store:
    """Make the default process group; returns the store for messages outside collectives."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    if worker.launched_by == "self":
        base: Store = dist.HashStore()
    else:
        base = _meeting_store(worker)
    # After a restart the store may be the same one, with the keys of the attempt before.
    store = dist.PrefixStore(f"mtb/{worker.attempt}", base)
    try:
        dist.init_process_group(
            # Beside nccl, gloo serves small host objects without waiting for the device.
            backend="cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=dist.PrefixStore("group", store),
            rank=worker.rank,
            world_size=worker.world.size,
            timeout=timeout,
            device_id=torch.device(device) if backend == "nccl" else None,
        )
    except BaseException as error:
        _leave_failed(worker, store, error)
        raise
    return store


def _meeting_store(worker: Worker) -> Store:
    """The store that the launcher hosts, or that rank 0 hosts where the launcher does not (Slurm)."""
    import torch.distributed as dist  # noqa: PLC0415

    try:
        store, _, _ = next(dist.rendezvous("env://", worker.rank, worker.world.size))
    except (RuntimeError, ValueError) as error:
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        msg = (
            f"Rank {worker.rank} cannot meet the others at MASTER_ADDR={address} MASTER_PORT={port}: "
            f"{str(error).splitlines()[0]} The address must be that of rank 0's machine as all machines see it, the "
            "port a free one there; set both, or let the launcher choose."
        )
        raise RunFailed(msg, rank=worker.rank) from error
    return store  # type: ignore[no-any-return]


def _mesh(device: str, layout: Layout) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    names, sizes = zip(*layout.axes, strict=True)
    return init_device_mesh(device.partition(":")[0], sizes, mesh_dim_names=names)


def _leave() -> None:
    """All is well: wait for everybody, then destroy the groups."""
    import torch.distributed as dist  # noqa: PLC0415

    # Work handles and wrapped models hold gloo's threads; those must be gone before the group is.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _leave_failed(worker: Worker, store: Store, error: BaseException) -> None:
    """Say why and leave without waiting; a rank that only lost its peers names their cause instead.

    Raises:
        PeerFailed: in place of `error`, if that is only a consequence.
    """
    failure = failure_of(error, worker.rank)
    cause = recorded_cause(store) if failure.secondary else None
    if cause is None:
        record_failure(store, failure)
    if worker.launched_by == "torchrun":
        _tell_torchrun(error)
    if worker.world.size == 1:
        # One rank waits for nobody, and its process may go on to the next run.
        _destroy_alone(error)
    if cause is not None and not _same(cause, failure):
        raise PeerFailed(cause) from error


def _same(cause: Failure, failure: Failure) -> bool:
    return (cause.rank, cause.kind, cause.message) == (failure.rank, failure.kind, failure.message)


def _tell_torchrun(error: BaseException) -> None:
    """Give torchrun the error for its own summary; it shows that of the first rank."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # noqa: PLC0415

    if isinstance(error, Exception):
        get_error_handler().record_exception(error)


def _destroy_alone(error: BaseException) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    traceback.clear_frames(error.__traceback__)  # they hold the model
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
