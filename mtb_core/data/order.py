"""The order of an epoch: a seeded permutation that is computed where it is needed and never stored."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .hashing import derive_keys, mix

_STREAM = 0x6F72646572  # keeps the order's keys apart from those of other streams of the same seed
_ROUNDS = 8


class EpochOrder:
    """For each epoch a permutation of ``range(size)`` that depends on (size, seed, epoch) only.

    A generalised Feistel network over pairs from ``range(a) x range(b)`` with a*b just above `size`; the few numbers
    beyond `size` walk on along their cycle until they are inside. Source: Black, Rogaway, "Ciphers with Arbitrary
    Finite Domains", CT-RSA 2002.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        left = math.isqrt(size - 1) + 1
        self._left, self._right = np.uint64(left), np.uint64(-(-size // left))

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples that stand at `positions` of the order of `epoch`; same shape, int64.

        Raises:
            ValueError: a position is not in ``range(size)``.
        """
        if positions.size and not 0 <= positions.min() <= positions.max() < self._size:
            msg = f"positions must lie in range({self._size}), got {positions.min()} to {positions.max()}"
            raise ValueError(msg)
        keys = derive_keys(_STREAM, self._seed, epoch, count=_ROUNDS)
        values = self._permute(positions.ravel().astype(np.uint64), keys)
        outside = np.flatnonzero(values >= self._size)
        while outside.size:
            walked = self._permute(values[outside], keys)
            values[outside] = walked
            outside = outside[walked >= self._size]
        return values.astype(np.int64).reshape(positions.shape)

    def _permute(self, values: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass of the network: a permutation of ``range(a * b)``."""
        left, right = np.divmod(values, self._right)
        for even, odd in keys.reshape(-1, 2):
            # Halved, a hash can't overflow the sum, which would break the bijection.
            left = (left + (mix(right ^ even) >> np.uint64(1))) % self._left
            right = (right + (mix(left ^ odd) >> np.uint64(1))) % self._right
        return left * self._right + right
