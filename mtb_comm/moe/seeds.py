"""Random numbers by name: every stream depends on the seed and on what it is for, on nothing else."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, stream: str, index: int = 0) -> torch.Generator:
    """A CPU generator for the `index`-th part of a named stream."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
