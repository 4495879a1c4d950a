"""The checks of this machine and installation; each is a function without arguments."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from mtb_core import DoctorResult
from mtb_core.registry.discovery import discover

_LEAST_DISK_BYTES = 2**30
_LEAST_SHM_BYTES = 32 * 2**20


def check_python() -> DoctorResult:
    """The interpreter is one that this version supports."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info < (3, 14):
        return DoctorResult(
            ok=False, detail=f"{version}; supported: 3.11 to 3.13. Make the environment with one of them."
        )
    return DoctorResult(ok=True, detail=version)


def check_torch() -> DoctorResult:
    """Torch imports, computes, and has distributed support."""
    import torch  # noqa: PLC0415

    if not torch.distributed.is_available():
        return DoctorResult(
            ok=False, detail=f"torch {torch.__version__} is built without torch.distributed; use another"
        )
    weight = torch.ones(2, 2, requires_grad=True)
    (weight @ weight).sum().backward()
    return DoctorResult(ok=True, detail=f"{torch.__version__}, {torch.get_num_threads()} threads")


def check_gloo() -> DoctorResult:
    """Two ranks sum a tensor over the network interface that runs here would use."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_gloo_available():
        return DoctorResult(ok=False, detail=f"torch {torch.__version__} is built without gloo; use another")
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    where = f"interface {interface} (GLOO_SOCKET_IFNAME)" if interface else "the loopback address"
    store = dist.HashStore()
    sums: list[float] = []
    errors: list[str] = []

    def rank(index: int) -> None:
        try:
            tensor = torch.full((1024,), float(index + 1))
            group = _gloo_group(store, index, interface)
            group.allreduce([tensor]).wait()
            sums.append(float(tensor.sum()))
        except Exception as error:  # noqa: BLE001  (a thread cannot raise; the text is the finding)
            errors.append(str(error))

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        reason = re.sub(r"^\[.*?\]\s*", "", errors[0].splitlines()[0])
        valid = ", ".join(name for _, name in socket.if_nameindex())
        detail = f"no all-reduce over {where}: {reason}; set GLOO_SOCKET_IFNAME to one of: {valid}"
        return DoctorResult(ok=False, detail=detail)
    if sums != [3.0 * 1024] * 2:
        return DoctorResult(ok=False, detail=f"an all-reduce of ones and twos over {where} gave the wrong sums {sums}")
    return DoctorResult(ok=True, detail=f"two ranks summed over {where}")


def _gloo_group(store: Any, rank: int, interface: str | None) -> Any:
    from torch.distributed import ProcessGroupGloo  # noqa: PLC0415

    # Torch offers no public way to choose the device.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    device = {"interface": interface} if interface else {"hostname": "127.0.0.1"}
    options._devices = [ProcessGroupGloo.create_device(**device)]  # noqa: SLF001
    options._timeout = timedelta(seconds=20)  # noqa: SLF001
    return ProcessGroupGloo(store, rank, 2, options)


def check_disk() -> DoctorResult:
    """The folder that run folders go to can be written and has room."""
    folder = Path("runs")
    while not folder.is_dir():
        folder = folder.parent
    shown = "the working directory" if folder == Path() else f"{folder}/"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"mtb")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = error.strerror or str(error)
        return DoctorResult(ok=False, detail=f"cannot write to {shown}: {reason}. Choose another with --run-dir DIR.")
    free = shutil.disk_usage(folder).free
    if free < _LEAST_DISK_BYTES:
        return DoctorResult(
            ok=False, detail=f"{_size(free)} free for {shown}; make room, or use --run-dir DIR elsewhere"
        )
    return DoctorResult(ok=True, detail=f"{_size(free)} free for {shown}")


def check_shm(folder: str = "/dev/shm") -> DoctorResult:  # noqa: S108  (the kernel's name, not a temporary file)
    """Shared memory, which NCCL and data loaders use between processes, has room."""
    if not Path(folder).is_dir():
        return DoctorResult(ok=None, detail=f"this system has no {folder}")
    free = shutil.disk_usage(folder).free
    if free < _LEAST_SHM_BYTES or not os.access(folder, os.W_OK):
        what = f"{_size(free)} free" if os.access(folder, os.W_OK) else "no permission to write"
        return DoctorResult(ok=False, detail=f"{folder}: {what}; in a container, raise it (docker run --shm-size=1g)")
    return DoctorResult(ok=True, detail=f"{_size(free)} free")


def check_cuda() -> DoctorResult:
    """Every CUDA device computes."""
    import torch  # noqa: PLC0415

    built = torch.version.cuda
    if built is None:
        return DoctorResult(ok=None, detail="torch is built without CUDA")
    if not torch.cuda.is_available():
        if any(Path("/dev").glob("nvidia[0-9]*")):
            detail = f"there is a GPU, but torch (CUDA {built}) cannot use it; the driver may be too old for it"
            return DoctorResult(ok=False, detail=detail)
        return DoctorResult(ok=None, detail="no CUDA device")
    names = []
    for index in range(torch.cuda.device_count()):
        torch.ones(8, device=f"cuda:{index}").sum().item()
        names.append(torch.cuda.get_device_name(index))
    nccl = "with NCCL" if torch.distributed.is_nccl_available() else "without NCCL"
    return DoctorResult(ok=True, detail=f"{_counted(names)}, CUDA {built}, {nccl}")


def check_plugins() -> DoctorResult:
    """Every installed plugin could be loaded."""
    records = discover(strict=False).records
    failed = [r for r in records if r.status == "failed"]
    if failed:
        return DoctorResult(ok=False, detail="; ".join(f"{r.label}: {r.reason}" for r in failed))
    active = [r.name for r in records if r.status == "active"]
    disabled = [r.name for r in records if r.status == "disabled"]
    return DoctorResult(ok=True, detail=", ".join(active) + (f" (disabled: {', '.join(disabled)})" if disabled else ""))


def _counted(names: list[str]) -> str:
    counts: Mapping[str, int] = {name: names.count(name) for name in names}
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
