"""Avoiding the import of ``torch._dynamo`` (seconds) in runs that compile nothing.

Eager training touches ``torch._dynamo`` in a few places only to say "do not compile this": making and stepping an
optimizer, wrapping in DDP, FSDP2's hooks, activation checkpointing. `avoid_dynamo_import` puts a stand-in for the
module in place that answers these few questions as the real one does while nothing is compiled. Whatever else is
asked of it (another name, a submodule, a setting that is written, ``torch.compile``) makes it give way: the real
module is imported and takes its place, and what the stand-in handed out turns to the real module from then on.

The environment variable ``MTB_NO_DYNAMO_SHIM=1`` switches all this off.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"
_CONFIG = "torch._dynamo.config"
_SWITCH = "MTB_NO_DYNAMO_SHIM"
_CACHE = "__dynamo_disable"  # where torch/_compile.py keeps what `disable` returned


def avoid_dynamo_import() -> bool:
    """Put the stand-in in place, unless the real module is there already; whether the stand-in is now in place."""
    if os.environ.get(_SWITCH, "") not in {"", "0"}:
        return False
    import torch  # noqa: PLC0415  (torch is imported when it is used)

    present = sys.modules.get(_NAME)
    if present is None:
        stand_in = _StandIn()
        sys.modules[_NAME] = stand_in
        torch._dynamo = stand_in  # noqa: SLF001
        sys.meta_path.insert(0, stand_in._finder)  # noqa: SLF001
        return True
    return isinstance(present, _StandIn)


class _StandIn(ModuleType):
    """Stand-in for ``torch._dynamo`` until somebody needs more of it than is defined here."""

    def __init__(self) -> None:
        super().__init__(_NAME, "Stand-in for torch._dynamo; gives way to it when it is needed.")
        spec = importlib.machinery.ModuleSpec(_NAME, None, is_package=True)
        own: dict[str, Any] = {
            "__spec__": spec,
            "__path__": [],  # makes it a package; its submodules are found by `_finder`
            "_finder": _Finder(self),
            "_lock": threading.RLock(),
            "_real": None,
            "_disabled": [],
            "utils": _Part(self, "utils", {"get_optimize_ddp_mode": self._optimize_ddp_mode}),
            "trace_rules": _Part(self, "trace_rules", {"clear_lru_cache": lambda: None}),
        }
        self.__dict__.update(own)

    def disable(
        self, fn: Any = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True
    ) -> Callable[..., Any]:
        """Nothing is compiled, so nothing needs to be kept from it, as long as the real module is not there."""
        if self._real is not None or not inspect.isroutine(fn):
            out: Callable[..., Any] = self._give_way().disable(fn, recursive, reason=reason, wrapping=wrapping)
            return out
        if not wrapping:  # torch's own decorator, which keeps the answer on the function
            self._disabled.append(fn)
            return fn

        @functools.wraps(fn)
        def until_needed(*args: Any, **kwargs: Any) -> Any:
            if self._real is None:
                return fn(*args, **kwargs)
            return disabled()(*args, **kwargs)

        @functools.cache
        def disabled() -> Callable[..., Any]:
            out: Callable[..., Any] = self._real.disable(fn, recursive, reason=reason)
            return out

        # By these marks the compiler, once it is there, knows what it must leave alone.
        until_needed.__dict__.update(
            _torchdynamo_disable=True, _torchdynamo_disable_msg=reason, _torchdynamo_orig_callable=fn
        )
        return until_needed

    @property
    def config(self) -> ModuleType:
        """The real settings: their module can be imported without its package, which will take it over as it is."""
        return importlib.import_module(_CONFIG)

    def _optimize_ddp_mode(self) -> str:
        """As ``torch._dynamo.utils.get_optimize_ddp_mode``."""
        if self.config.optimize_ddp is True:
            return "ddp_optimizer"
        return str(self._give_way().utils.get_optimize_ddp_mode())

    def graph_break(self, msg: str = "") -> None:
        """Means something to the compiler only."""

    def is_compiling(self) -> bool:
        """As ``torch.compiler`` says; tracing does not need the real module."""
        import torch  # noqa: PLC0415

        return torch.compiler.is_compiling()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system and `inspect` look at every module
            msg = f"module {_NAME!r} has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(self._give_way(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "config" and value is sys.modules.get(_CONFIG):
            return  # the import system sets a submodule on its package; here it is a property
        setattr(self._give_way(), name, value)

    def __dir__(self) -> list[str]:
        return dir(self._give_way())

    def _give_way(self) -> ModuleType:
        """Import the real module in this one's place."""
        with self._lock:
            if self._real is None:
                self._remove()
                real = _import_real()
                for fn in self._disabled:
                    fn.__dict__.pop(_CACHE, None)  # torch asks again, now the real module
                self._disabled.clear()
                self.__dict__["_real"] = real
        return self._real  # type: ignore[no-any-return]

    def _remove(self) -> None:
        import torch  # noqa: PLC0415

        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        if torch.__dict__.get("_dynamo") is self:
            del torch._dynamo  # noqa: SLF001
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)


def _import_real() -> ModuleType:
    config = sys.modules.get(_CONFIG)
    if config is None:
        return importlib.import_module(_NAME)
    # Its settings are loaded already: the package must find them as its attribute, as if it had imported them.
    spec = importlib.util.find_spec(_NAME)
    assert spec is not None
    assert spec.loader is not None
    real = importlib.util.module_from_spec(spec)
    real.config = config  # type: ignore[attr-defined]
    sys.modules[_NAME] = real
    try:
        spec.loader.exec_module(real)
    except BaseException:
        sys.modules.pop(_NAME, None)
        raise
    import torch  # noqa: PLC0415

    torch._dynamo = real  # noqa: SLF001
    return real


class _Part:
    """A stand-in for one attribute of the module: a few known answers, else the real one's."""

    def __init__(self, module: _StandIn, name: str, known: dict[str, Any]) -> None:
        self.__dict__.update(_module=module, _name=name, _known=known)

    def __getattr__(self, name: str) -> Any:
        if self._module._real is None and name in self._known:  # noqa: SLF001
            return self._known[name]
        return getattr(getattr(self._module._give_way(), self._name), name)  # noqa: SLF001

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(self._module._give_way(), self._name), name, value)  # noqa: SLF001


class _Finder(importlib.abc.MetaPathFinder):
    """Makes the stand-in give way when one of the package's submodules is imported."""

    def __init__(self, module: _StandIn) -> None:
        self._module = module

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """The submodule, from the real package; None for other modules."""
        if not fullname.startswith(_NAME + "."):
            return None
        if fullname == _CONFIG:
            import torch  # noqa: PLC0415

            return importlib.machinery.PathFinder.find_spec(fullname, [f"{torch.__path__[0]}/_dynamo"], target)
        real = self._module._give_way()  # noqa: SLF001
        present = sys.modules.get(fullname)
        if present is not None:  # it came with its package; it must not be run twice
            return importlib.machinery.ModuleSpec(fullname, _Present(present))
        return importlib.machinery.PathFinder.find_spec(fullname, real.__path__, target)


class _Present(importlib.abc.Loader):
    """Loads a module that is already there."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:  # noqa: ARG002
        """The module itself."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It has run; only its own specification is put back."""
        module.__spec__ = self._spec
