"""Data: where samples come from, in which order, and how they reach a rank. Each module says what it provides.

`loader` and `evaluation` need torch, the others numpy; importing the package alone loads neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dataset import Dataset

__all__ = ["Dataset"]


def __getattr__(name: str) -> Any:
    if name == "Dataset":
        return importlib.import_module(".dataset", __name__).Dataset
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
