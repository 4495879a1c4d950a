"""The launcher `local`: ranks on this machine, or on several through torch's rendezvous. See ``docs/launching.md``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .child import die_with
    from .elastic import launch
    from .processes import pick_method

__all__ = ["die_with", "launch", "pick_method"]

_LAZY = {"die_with": ".child", "launch": ".elastic", "pick_method": ".processes"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    msg = f"module 'mtb_launcher' has no attribute {name!r}"
    raise AttributeError(msg)
