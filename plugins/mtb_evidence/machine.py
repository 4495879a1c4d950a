"""Facts about the machine beyond Python's: sockets, memory nodes, clock policy, GPUs. Linux; torch-free.

What a machine does not tell is None.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

CPU = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")


def read(path: str | Path) -> str | None:
    """The text of a small file; None where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def cpu_quota(root: Path = _CGROUP) -> float | None:
    """Number of cores whose time this container may use (cgroup v2 ``cpu.max``, v1 ``cfs_quota_us``); None: no limit."""
    whole = (read(root / "cpu.max") or "").split()
    if len(whole) != 2:
        whole = [(read(root / "cpu" / f"cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")]
    try:
        quota, period = map(int, whole)
    except ValueError:  # "max", or not told
        return None
    return quota / period if quota > 0 and period > 0 else None


def numa_nodes() -> int | None:
    """Number of memory nodes."""
    return len(list(_NODES.glob("node[0-9]*"))) or None


def governor() -> str | None:
    """The CPU's frequency governor; "mixed" where cores differ; None where it is the host's, or nobody's, to choose."""
    found = {text.strip() for path in CPU.glob("cpu[0-9]*/cpufreq/scaling_governor") if (text := read(path))}
    if len(found) > 1:
        return "mixed"
    return found.pop() if found else None


def sockets() -> int | None:
    """Number of processor packages."""
    paths = CPU.glob("cpu[0-9]*/topology/physical_package_id")
    return len({text.strip() for path in paths if (text := read(path))}) or None


def gpu_driver() -> str | None:
    """Version of NVIDIA's kernel driver."""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", read("/proc/driver/nvidia/version") or "")
    return found[1] if found else None


def gpu_topology() -> dict[str, str] | None:
    """Connections of GPUs by pair, from ``nvidia-smi topo -m``: {"0-1": "NV12"}; None for fewer than two."""
    text = nvidia_smi("topo", "-m")
    return None if text is None else parse_topology(text) or None


def parse_topology(text: str) -> dict[str, str]:
    """The pairs of GPUs in the matrix that ``nvidia-smi topo -m`` prints."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    named = {row[0].removeprefix("GPU"): row[1:] for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0])}
    header = next((row for row in rows if row and row[0] == "GPU0" and row[1:2] != ["X"]), ["GPU0"])
    gpus = [name.removeprefix("GPU") for name in header if re.fullmatch(r"GPU\d+", name)]
    return {
        f"{a}-{b}": links[at]
        for a, links in named.items()
        for at, b in enumerate(gpus)
        if int(a) < int(b) and at < len(links)
    }


def nvidia_smi(*words: str) -> str | None:
    """Output of ``nvidia-smi``; None without it, or if it fails or hangs."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
