"""Probes for checks of processes: what a rank has open, which groups it is in, and which hooks are called."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
import torch.distributed as dist

from mtb_core.api.hooks import hookimpl
from mtb_core.api.values import Prepared
from mtb_core.registry.run_hooks import METHODS

from .episodes import Probe
from .stage import RankTrace, Stage

_TENSOR = "torch.distributed.tensor"
#: Threads and connections of a group that was destroyed may take so long to go.
_SETTLE_S = 2.0
#: Torch's caches that `clear_caches_of_torch` has found.
_caches: list[Any] = []


@attrs.frozen
class Groups(Probe):
    """Notes the process groups before ``prepare`` and after ``close``, name to ranks, as ``groups``."""

    fresh: ClassVar[bool] = True

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _Groups(stage)


class _Groups:
    def __init__(self, stage: Stage) -> None:
        self._seen: dict[str, dict[str, list[int]]] = stage.trace.notes.setdefault("groups", {})

    @hookimpl(wrapper=True)
    def mtb_prepare(self) -> Generator[None, Prepared, Prepared]:
        self._seen["before"] = _groups()
        return (yield)

    @hookimpl(wrapper=True)
    def mtb_close(self) -> Generator[None, None, None]:
        yield
        self._seen["after"] = _groups()


def _groups() -> dict[str, list[int]]:
    """Groups of this process; torch has no public list of them."""
    world = dist.distributed_c10d._world  # noqa: SLF001
    return {world.pg_names[group]: sorted(world.pg_group_ranks.get(group, {})) for group in world.pg_map}


@attrs.frozen
class Leftovers(Probe):
    """Notes what the process has after a run that it had not before, its groups gone: ``threads`` and ``files``.

    Both are counts by name; of files also what kind of socket.
    """

    fresh: ClassVar[bool] = True

    def observer(self, stage: Stage) -> object:  # noqa: ARG002  (it only looks from outside the run)
        """See the class."""
        return _Nothing()

    def around(self, trace: RankTrace) -> contextlib.AbstractContextManager[None]:
        """See the class."""
        return _leftovers(trace)


@attrs.frozen
class Surroundings(Probe):
    """Notes under ``surroundings`` what the run has changed around it: what, and how.

    Working directory, environment, signal handlers; and files in the working directory, which is an empty one of this
    rank's own meanwhile.
    """

    fresh: ClassVar[bool] = True

    def observer(self, stage: Stage) -> object:  # noqa: ARG002  (it only looks from outside the run)
        """See the class."""
        return _Nothing()

    def around(self, trace: RankTrace) -> contextlib.AbstractContextManager[None]:
        """See the class."""
        return _surroundings(trace)


@contextlib.contextmanager
def _surroundings(trace: RankTrace) -> Iterator[None]:
    home = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="mtb-kit-cwd-") as folder:
        os.chdir(folder)
        here, environment, handlers = Path.cwd(), dict(os.environ), _handlers()
        try:
            yield
        finally:
            changed: dict[str, str] = {}
            if Path.cwd() != here:
                changed["working directory"] = str(Path.cwd())
            os.chdir(home)
            if left := sorted(path.name for path in here.iterdir()):
                changed["files"] = ", ".join(left)
            if other := _different(environment, dict(os.environ)):
                changed["environment"] = ", ".join(other)
            if other := _different(handlers, _handlers()):
                changed["signal handlers"] = ", ".join(other)
            trace.notes["surroundings"] = changed


def _handlers() -> dict[str, Any]:
    return {
        number.name: signal.getsignal(number)
        for number in sorted(signal.valid_signals())
        if isinstance(number, signal.Signals)
    }


def _different(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


class _Nothing:
    @hookimpl
    def mtb_run_finished(self) -> None:
        """Every run plugin implements a hook."""


@contextlib.contextmanager
def _leftovers(trace: RankTrace) -> Iterator[None]:
    # Its functions have the default group of the moment as a default argument, and keep it: it is imported before there
    # is one. Otherwise FSDP imports it, and in a spawned rank that is in the run.
    importlib.import_module("torch.distributed.nn.functional")
    # The first backward of a process has torch look for devices and start a thread for each GPU, to stay.
    torch.zeros((), requires_grad=True).backward()
    before = _threads(), _files()
    yield
    clear_caches_of_torch()
    gc.collect()
    trace.notes["threads"] = _more(_threads, before[0])
    trace.notes["files"] = _more(_files, before[1])


def clear_caches_of_torch() -> None:
    """Let go of the meshes that torch's caches of sharded operations keep, and with them their groups.

    In a rank after its run; and before ranks are forked. A forked rank must not free a group that it has inherited: the
    group's destructor waits for threads that only the other process has. So it does not look at inherited objects either
    (they stay frozen), but knows their caches, which it has inherited empty.
    """
    if _TENSOR not in sys.modules:
        return
    torch._C._clear_DTensor_sharding_propagator_cache()  # noqa: SLF001  (there is no public way)
    kept = type(functools.lru_cache(_groups))
    # Not isinstance, which has torch warn of some of its own objects.
    found = [o for o in gc.get_objects() if type(o) is kept]
    inherited = _caches if gc.get_freeze_count() else []
    _caches[:] = [o for o in (*found, *inherited) if (getattr(o, "__module__", None) or "").startswith(_TENSOR)]
    for cached in _caches:
        cached.cache_clear()
    for module in [m for name, m in sys.modules.items() if name.startswith(_TENSOR)]:
        for name, value in vars(module).items():
            if "cache" in name.lower() and isinstance(value, dict):
                value.clear()


def _more(count: Callable[[], Counter[str]], before: Counter[str]) -> dict[str, int]:
    """Surplus over `before` once there is none, or after some patience."""
    deadline = time.monotonic() + _SETTLE_S
    more = count() - before
    while more and time.monotonic() < deadline:
        time.sleep(0.05)  # what is left is the system's to close; nothing tells when it has
        more = count() - before
    return dict(more)


def _threads() -> Counter[str]:
    """Threads of this process by name; those that Python knows by Python's name."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    seen: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            seen[python.get(int(task.name)) or (task / "comm").read_text().strip()] += 1
    return seen


def _files() -> Counter[str]:
    """Open descriptors of this process by what they lead to."""
    listening = _listening()
    seen: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            target = str(entry.readlink())
            if target.startswith("socket:"):
                inode = target[len("socket:[") : -1]
                target = f"socket listening on port {listening[inode]}" if inode in listening else "socket"
            elif target.startswith("pipe:"):
                target = "pipe"
            seen[target] += 1
    return seen


def _listening() -> dict[str, int]:
    """Ports by the inode of the socket that listens on them."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    found[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return found


@attrs.frozen
class HookCalls(Probe):
    """Counts by step how often each method of the strategy is called, under ``hook_calls``.

    Step 0 is before the first step; calls that the strategy makes to its own methods count too.
    """

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _HookCalls(stage)


class _HookCalls:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._seen: dict[int, Counter[str]] = stage.trace.notes.setdefault("hook_calls", {})
        for name in METHODS:
            stage.intercept(name, functools.partial(self._counting, name))

    def _counting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:
            self._seen.setdefault(self._stage.step, Counter())[name] += 1
            return method(*values, **named)

        return call

    @hookimpl
    def mtb_run_finished(self) -> None:
        """Every run plugin implements a hook."""
