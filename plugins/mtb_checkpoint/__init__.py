"""Tools for checkpoints on disk, also as the command group ``mtb checkpoint``. See ``docs/checkpoints.md``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compare import compare_checkpoints
    from .export import export_safetensors
    from .verify import verify_checkpoint

__all__ = ["compare_checkpoints", "export_safetensors", "verify_checkpoint"]

_LAZY = {"compare_checkpoints": ".compare", "export_safetensors": ".export", "verify_checkpoint": ".verify"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    msg = f"module 'mtb_checkpoint' has no attribute {name!r}"
    raise AttributeError(msg)
