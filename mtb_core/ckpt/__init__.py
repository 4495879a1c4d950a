"""Checkpoints: exact, published atomically, verifiable, and safe to load; for our trainer and for any other loop.

Loops use `CheckpointManager`. Authors of a checkpoint format write a `Storage`; the other names are what it is made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtb_core.api.lazy import lazy_names

if TYPE_CHECKING:
    from mtb_core.ranks.rng import capture_rng, reseed, restore_rng

    from .dtypes import CARRIERS, carrier, item_bytes
    from .entries import Chunk, Part, TensorEntry, checked_count, checked_entry, checked_extent
    from .files import read_small
    from .layout import DamagedCheckpoint
    from .loading import Loaded
    from .manager import CheckpointManager
    from .manifest import reading
    from .storage import FileLayout, Slot, Storage
    from .tensors import TensorFiles

#: Loaded when first touched, for some import torch or numpy.
_LAZY = {
    "CARRIERS": ".dtypes",
    "CheckpointManager": ".manager",
    "Chunk": ".entries",
    "DamagedCheckpoint": ".layout",
    "FileLayout": ".storage",
    "Loaded": ".loading",
    "Part": ".entries",
    "Slot": ".storage",
    "Storage": ".storage",
    "TensorEntry": ".entries",
    "TensorFiles": ".tensors",
    "capture_rng": "..ranks.rng",
    "carrier": ".dtypes",
    "checked_count": ".entries",
    "checked_entry": ".entries",
    "checked_extent": ".entries",
    "item_bytes": ".dtypes",
    "read_small": ".files",
    "reading": ".manifest",
    "reseed": "..ranks.rng",
    "restore_rng": "..ranks.rng",
}

__all__ = [
    "CARRIERS",
    "CheckpointManager",
    "Chunk",
    "DamagedCheckpoint",
    "FileLayout",
    "Loaded",
    "Part",
    "Slot",
    "Storage",
    "TensorEntry",
    "TensorFiles",
    "capture_rng",
    "carrier",
    "checked_count",
    "checked_entry",
    "checked_extent",
    "item_bytes",
    "read_small",
    "reading",
    "reseed",
    "restore_rng",
]

__getattr__ = lazy_names(__name__, _LAZY)
