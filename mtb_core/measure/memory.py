"""Peak memory of this rank: on CPU the process's peak resident set, on CUDA the allocator's peak. It says which."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

_MIB = 2**20
#: The two readings of the kernel below differ by its per-CPU counters; more than this is another cause.
_COUNTER_SLACK_MIB = 4.0


class PeakMemory:
    """Peak memory since this object was made, where the platform allows a reset; otherwise since the process began.

    Attributes:
        kind: ``"process_rss"``, the process's peak resident set, memory shared with its parent included; or
            ``"cuda_allocated"``, the peak of tensors in torch's caching allocator on this rank's device.
    """

    def __init__(self, device: str) -> None:
        self._read: Callable[[], float]
        if device.startswith("cuda"):
            self.kind = "cuda_allocated"
            self._read = _cuda_reader(device)
        else:
            self.kind = "process_rss"
            self._read = _resident_reader()

    def mib(self) -> float:
        """The peak so far, MiB. Costs a few microseconds, so it may be read every step; never synchronises."""
        return self._read()


def _cuda_reader(device: str) -> Callable[[], float]:
    import torch  # noqa: PLC0415  (only where a device is used)

    torch.cuda.reset_peak_memory_stats(device)
    return lambda: torch.cuda.max_memory_allocated(device) / _MIB


def _resident_reader() -> Callable[[], float]:
    """The cheapest reading that is right.

    ``getrusage`` takes 2 µs and the status file of /proc 70 µs. But the former also remembers what was there before
    ``exec``: a worker started by a large launcher would report the launcher's peak. Whether it does shows at once,
    after the reset.
    """
    _reset_resident_peak()
    precise = _status_peak()
    if precise is None or _usage_peak() <= precise + _COUNTER_SLACK_MIB:
        return _usage_peak
    return lambda: _status_peak() or 0.0


def _reset_resident_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # not Linux, or not allowed: the peak then counts from the start of the process


def _usage_peak() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _MIB


def _status_peak() -> float | None:
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    _, found, rest = text.partition("VmHWM:")
    return int(rest.split(None, 1)[0]) / 1024 if found else None
