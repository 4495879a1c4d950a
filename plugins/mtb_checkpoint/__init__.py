"""Tools for checkpoints on disk, also as the command group ``mtb checkpoint``. See ``docs/checkpoints.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtb_core import lazy_names

if TYPE_CHECKING:
    from .compare import compare_checkpoints
    from .export import export_safetensors
    from .verify import verify_checkpoint

__all__ = ["compare_checkpoints", "export_safetensors", "verify_checkpoint"]

_LAZY = {"compare_checkpoints": ".compare", "export_safetensors": ".export", "verify_checkpoint": ".verify"}

__getattr__ = lazy_names(__name__, _LAZY)
