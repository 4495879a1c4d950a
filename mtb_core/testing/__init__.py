"""The former place of the conformance kit, kept for one release: use `mtb_kit`, of the distribution ``mtb-kit``."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

_MODULES = ("examples", "held", "launches", "live", "recording")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        kit = importlib.import_module("mtb_kit")
    except ModuleNotFoundError as error:
        raise ImportError("The conformance kit is not installed: pip install mtb-kit.") from error
    warnings.warn("mtb_core.testing is mtb_kit now, and will be removed.", DeprecationWarning, stacklevel=2)
    return importlib.import_module(f"mtb_kit.{name}") if name in _MODULES else getattr(kit, name)
