"""The launcher `local`: ranks on this machine, or on several through torch's rendezvous. See ``docs/launching.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtb_core import lazy_names

if TYPE_CHECKING:
    from .child import die_with
    from .elastic import launch
    from .processes import pick_method

__all__ = ["die_with", "launch", "pick_method"]

_LAZY = {"die_with": ".child", "launch": ".elastic", "pick_method": ".processes"}

__getattr__ = lazy_names(__name__, _LAZY)
