"""The digest of a token file's tokens, as its header holds it."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

_CHUNK_BYTES = 1 << 24


def digest_of(tokens: NDArray[np.unsignedinteger]) -> str:
    """The digest of `tokens`; reads them all, a chunk at a time."""
    state = new_digest()
    raw = np.asarray(tokens).view(np.uint8)
    for start in range(0, len(raw), _CHUNK_BYTES):
        state.update(raw[start : start + _CHUNK_BYTES].data)
    return digest_text(state)


def new_digest() -> xxhash.xxh3_128:
    """The running digest of a token file."""
    return xxhash.xxh3_128()


def digest_text(state: xxhash.xxh3_128) -> str:
    """Text form of a digest."""
    return f"xxh3_128:{state.hexdigest()}"
