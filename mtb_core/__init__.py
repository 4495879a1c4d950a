"""MiniTrainBench's core: what every run needs, and the plugin contract. See `mtb_core.api` for the latter.

Importing it imports no torch; `run`, `Result` and `TrainConfig` load what they need when first touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import api
from .api import *  # noqa: F403  (the public contract is re-exported under one roof)

if TYPE_CHECKING:
    from .api.state import module_state
    from .config import TrainConfig, load_config
    from .measure.result import Result
    from .running import run

__version__ = "0.1.0"

_LAZY = {
    "TrainConfig": ".config",
    "load_config": ".config",
    "Result": ".measure.result",
    "module_state": ".api.state",
    "run": ".running",
}

__all__ = [*api.__all__, "Result", "TrainConfig", "__version__", "load_config", "module_state", "run"]  # noqa: PLE0604  (they are strings)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    msg = f"module 'mtb_core' has no attribute {name!r}"
    raise AttributeError(msg)
