"""Public names of a package that are imported when they are first touched, so that the package itself needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for the package `package`; `modules` has the relative module of each name.

    ::

        __getattr__ = lazy_names(__name__, {"wrap_ddp": ".wrapping"})
    """

    def load(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(modules[name], package), name)
        msg = f"module {package!r} has no attribute {name!r}"
        raise AttributeError(msg)

    return load
