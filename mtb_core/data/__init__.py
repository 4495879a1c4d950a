"""Data: where samples come from, in which order, and how they reach a rank. Each module says what it provides.

`loader` and `evaluation` need torch, the others numpy; importing the package alone loads neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtb_core.api.lazy import lazy_names

if TYPE_CHECKING:
    from .dataset import Dataset

__all__ = ["Dataset"]

__getattr__ = lazy_names(__name__, {"Dataset": ".dataset"})
