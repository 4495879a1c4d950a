"""Counter-based random numbers: the output function of SplitMix64, vectorised.

A value depends on (key, counter) only, so any part of a stream is had without the parts before it. Source: Steele,
Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; constants are those of Stafford's mix 13.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Distance between neighbouring counters of a stream: 2^64 divided by the golden ratio, odd.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble `values` in place and return them; a bijection of 64-bit words whose every output bit looks random."""
    values ^= values >> _30
    values *= _FIRST
    values ^= values >> _27
    values *= _SECOND
    values ^= values >> _31
    return values


def derive_keys(*parts: int, count: int = 1) -> NDArray[np.uint64]:
    """`count` keys for the stream named by `parts` (64-bit integers); other parts or another order give other keys."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state ^= np.uint64(part)
        state += GOLDEN
        mix(state)
    return mix(state + GOLDEN * np.arange(1, count + 1, dtype=np.uint64))
