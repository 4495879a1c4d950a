"""What the machine says of itself is read as its tools print it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtb_evidence import machine

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\t0-31\t0\tN/A
GPU1\tNV12\t X \tPIX\t0-31\t0\tN/A
GPU2\tSYS\tPIX\t X \t0-31\t0\tN/A

Legend:
  X    = Self
"""


def test_topology_by_pair() -> None:
    """Each pair of GPUs once, with the kind of its connection."""
    assert machine.parse_topology(TOPOLOGY) == {"0-1": "NV12", "0-2": "SYS", "1-2": "PIX"}


def test_without_a_gpu_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without NVIDIA's tools has no topology, and that is no failure."""
    monkeypatch.setenv("PATH", "")
    assert machine.gpu_topology() is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.173.02  Tue\nGCC version", "580.173.02"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build", "570.86.15"),
        (None, None),
    ],
)
def test_driver(monkeypatch: pytest.MonkeyPatch, text: str | None, expected: str | None) -> None:
    """The driver's version, of both kinds of kernel module."""
    monkeypatch.setattr(machine, "read", lambda _path: text)
    assert machine.gpu_driver() == expected


def test_governors_that_differ(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """One name where all cores agree, "mixed" where not, None where there is none."""
    monkeypatch.setattr(machine, "CPU", tmp_path)
    assert machine.governor() is None
    for core, name in enumerate(("performance", "performance", "powersave")):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        assert machine.governor() == ("performance" if core else None)
        (folder / "scaling_governor").write_text(name + "\n")
    assert machine.governor() == "mixed"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "odd"}, None),
        ({}, None),
    ],
)
def test_a_containers_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    """Both versions of cgroups, with and without a limit; what is not told is no limit."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.cpu_quota(tmp_path) == quota
