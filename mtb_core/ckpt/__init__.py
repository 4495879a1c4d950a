"""Checkpoints: exact, published atomically, verifiable, and safe to load; for our trainer and for any other loop."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loading import Loaded
    from .manager import CheckpointManager
    from .rng import capture_rng, reseed, restore_rng

#: Loaded when first touched, for they import torch.
_LAZY = {
    "CheckpointManager": ".manager",
    "Loaded": ".loading",
    "capture_rng": ".rng",
    "reseed": ".rng",
    "restore_rng": ".rng",
}

__all__ = ["CheckpointManager", "Loaded", "capture_rng", "reseed", "restore_rng"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
