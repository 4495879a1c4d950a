"""The place of a run and what exactly was run: enough to repeat it, nothing that identifies a person or machine.

Never recorded: host names, addresses, GPU UUIDs, proxies, credentials, home folders. Environment variables are taken
from a list of names, never all of them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtb_core import redact, redact_command
from mtb_core.ranks.network import set_here
from mtb_core.ranks.worker import available_cores

from .machine import governor, gpu_driver, gpu_topology, numa_nodes, sockets

_LIBRARIES = ("numpy", "pluggy", "attrs", "click", "safetensors", "tokenizers", "triton", "deepspeed", "xxhash")
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "DS_ACCELERATOR",
    "GLOO_SOCKET_IFNAME",
    "KMP_AFFINITY",
    "MKL_NUM_THREADS",
    "MTB_DISABLE_PLUGINS",
    "MTB_NO_DYNAMO_SHIM",
    "MTB_STRICT_PLUGINS",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
)
_IMAGE_VARIABLES = {
    "build_revision": "MTB_BUILD_REVISION",
    "image_ref": "MTB_IMAGE_REF",
    "image_id": "MTB_IMAGE_ID",
    "base_image": "MTB_BASE_IMAGE",
}
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_VARIABLES = ("KUBERNETES_SERVICE_HOST", "APPTAINER_NAME", "SINGULARITY_NAME", "container")


def environment(device: str = "cpu") -> dict[str, Any]:
    """The machine and software this process runs on; strict JSON.

    CUDA, cuDNN, NCCL and the devices' names are filled in only where `device` is a CUDA device: nothing here touches
    CUDA otherwise.
    """
    import torch  # noqa: PLC0415  (a run has it loaded already)

    return {
        "os": _system(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu_model": _cpu_model(),
        "cpu_cores": available_cores(),
        "cpu_cores_total": os.cpu_count(),
        "cpu_sockets": sockets(),
        "numa_nodes": numa_nodes(),
        "governor": governor(),
        "memory_mib": _memory_mib(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "libraries": _libraries(),
        "cuda": _cuda() if device.startswith("cuda") else None,
        "variables": {
            name: redact(os.environ[name]) for name in _VARIABLES if name in os.environ and name not in set_here
        },
    }


def provenance(argv: Sequence[str], *, folder: str | Path | None = None) -> dict[str, Any]:
    """Revision of the code, image and command of this run; see ``docs/reference/json.md``.

    `folder` is a folder of the project that ran; by default the checkout that holds this package, else the working
    directory. ``git_dirty`` tells whether tracked files differ from the revision, ``git_diff_digest`` is the
    SHA-256 of that difference as ``git diff`` prints it. The revision may also be given by
    ``MTB_GIT_REVISION``, for places without a checkout; where that is the checkout's own, whole or shortened, what is
    known of the checkout stays known, and of another revision ``git_dirty`` is None. A field that applies here but is not known is listed in
    ``missing_fields``; outside a container the image's fields do not apply.
    """
    given = os.environ.get("MTB_GIT_REVISION")
    found, dirty = _git(folder)
    here = not given or (found is not None and same_revision(given, found))
    out: dict[str, Any] = {
        "git_revision": found if here else given,
        "git_dirty": dirty if here else None,
        "git_diff_digest": _diff_digest(folder) if dirty and here else None,
    }
    for field, variable in _IMAGE_VARIABLES.items():
        value = os.environ.get(variable)
        out[field] = redact(value) if value else None
    out["command"] = redact_command(argv)
    needed = ["git_revision", "git_dirty", "command"]
    if out["git_dirty"]:
        needed.append("git_diff_digest")
    if in_container():
        needed += _IMAGE_VARIABLES
    out["missing_fields"] = [name for name in needed if out[name] in (None, "")]
    out["complete"] = not out["missing_fields"]
    return out


def same_revision(a: str, b: str) -> bool:
    """True if two texts name one revision: equal, or one the other's beginning of at least 7 digits (as git shortens)."""
    short, long = sorted((a.strip().lower(), b.strip().lower()), key=len)
    return short == long or (len(short) >= 7 and long.startswith(short))


def in_container(environ: Mapping[str, str] = os.environ) -> bool:
    """True if this process runs in a container, by the marks that container engines leave."""
    names = (*_CONTAINER_VARIABLES, *_IMAGE_VARIABLES.values())
    return any(environ.get(n) for n in names) or any(Path(mark).exists() for mark in _CONTAINER_MARKS)


def _git(folder: str | Path | None) -> tuple[str | None, bool | None]:
    """(revision, dirty) of `folder`, or of the first of the usual places that is in a checkout."""
    for place in _places(folder):
        # One call for both.
        printed = _ask_git(place, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
        lines = (printed or b"").decode(errors="replace").splitlines()
        revision = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), None)
        if revision and revision != "(initial)":
            return revision, any(not line.startswith("#") for line in lines)
    return None, None


def _diff_digest(folder: str | Path | None) -> str | None:
    """SHA-256 of what tracked files differ in from HEAD, in the first of the usual places that is in a checkout."""
    for place in _places(folder):
        printed = _ask_git(place, "diff", "--no-ext-diff", "--no-color", "--binary", "HEAD")
        if printed:
            return hashlib.sha256(printed).hexdigest()
    return None


def _places(folder: str | Path | None) -> list[str | Path]:
    return [folder] if folder is not None else [Path(__file__).parent, Path.cwd()]


#: Variables that make git look at another checkout than the one around a folder.
_ELSEWHERE = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE"}


def _ask_git(place: str | Path, *words: str) -> bytes | None:
    """Output of git for the checkout around `place`; None if it fails.

    It takes no lock, so that it cannot disturb another git, and the caller's variables name no other checkout: git sets
    them for its hooks.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    environ["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(
            ["git", "-C", str(place), *words], capture_output=True, timeout=5, check=False, env=environ
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _memory_mib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
    except (ValueError, OSError):
        return None


def _libraries() -> dict[str, str]:
    out = {}
    for name in _LIBRARIES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def _cuda() -> dict[str, Any]:
    import torch  # noqa: PLC0415

    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "version": torch.version.cuda,
        "driver": gpu_driver(),
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "devices": [
            {
                "name": d.name,
                "memory_mib": round(d.total_memory / 2**20, 1),
                "compute_capability": f"{d.major}.{d.minor}",
            }
            for d in devices
        ],
        "topology": gpu_topology() if len(devices) > 1 else None,
    }
