"""Peak memory of a rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mtb_core.measure.memory import PeakMemory

BLOCK_MIB = 64

#: Prints the growth of the peak while BLOCK_MIB is held, the peak after it is freed, and that of a new object.
PROBE = f"""
from mtb_core.measure.memory import PeakMemory
peak = PeakMemory("cpu")
before = peak.mib()
block = bytearray(b"x" * ({BLOCK_MIB} << 20))
held = peak.mib()
del block
print(before, held, peak.mib(), PeakMemory("cpu").mib())
"""


def probe(prelude: str = "") -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", prelude + PROBE], capture_output=True, text=True, check=True, timeout=240
    )
    return [float(word) for word in done.stdout.split()]


def test_says_what_it_measures() -> None:
    """On CPU the kind is the resident set of the process, in MiB."""
    peak = PeakMemory("cpu")
    assert peak.kind == "process_rss"
    assert 1 < peak.mib() < 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the peak")
def test_peak_stays_and_a_new_one_starts_afresh() -> None:
    """The peak rises with what is held, stays when it is freed, and starts afresh with a new trial."""
    before, held, freed, fresh = probe()
    # `b"x" * n` and its copy are both alive for a moment
    assert BLOCK_MIB - 4 < held - before < 2 * BLOCK_MIB + 8
    assert held <= freed
    assert fresh < held - BLOCK_MIB + 8


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel hands the peak on at exec")
def test_a_large_parents_peak_is_not_the_workers() -> None:
    """A worker started by a large process reports its own peak, not what its parent had before exec."""
    worker = "import sys; from mtb_core.measure.memory import PeakMemory; print(PeakMemory('cpu').mib())"
    parent = (
        "import os, sys\n"
        "block = bytearray(b'x' * (200 << 20))\n"
        f"os.execv(sys.executable, [sys.executable, '-c', {worker!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True, timeout=240)
    assert float(done.stdout) < 150
