"""Loading one plugin, so that nothing it does wrong reaches anyone else."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pluggy

from mtb_core.api import PLUGIN_API, CommandInfo, DiscoverySpecs, NoOptions, RunSpecs, nearest

from .entry_points import Source
from .records import KINDS, Kind, PluginRecord


@attrs.frozen
class Loaded:
    """A loaded plugin: its record, and what it describes by kind and name (empty where it failed)."""

    record: PluginRecord
    infos: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)


class Refused(Exception):
    """The plugin breaks the contract; the text says how."""


def load(source: Source) -> Loaded:
    """Import the plugin at `source` and ask its discovery hooks. Whatever goes wrong ends up in the record.

    Anything but KeyboardInterrupt is caught, SystemExit too. What the plugin prints meanwhile goes to stderr, because
    stdout may have to hold one JSON document.
    """
    record = PluginRecord(source.name, source.distribution, source.version, "failed")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            plugin = _import(source)
            api = _api(plugin)
            record = attrs.evolve(record, api=api)
            manager = _checked_manager(plugin)
            record = attrs.evolve(record, hooks=_implemented(manager, plugin))
            _check_changes(api, record.hooks)
            infos = {kind.plural: _ask(manager, kind) for kind in KINDS if kind.hook in record.hooks}
        record = attrs.evolve(record, provides={plural: tuple(found) for plural, found in infos.items()})
    except KeyboardInterrupt:
        raise
    except Refused as error:
        return Loaded(attrs.evolve(record, reason=str(error)))
    except BaseException as error:  # noqa: BLE001  (a plugin that calls sys.exit must not end mtb)
        return Loaded(attrs.evolve(record, reason=f"it raised {_describe(error)}"))
    return Loaded(attrs.evolve(record, status="active"), infos)


def _import(source: Source) -> Any:
    if not source.module:
        msg = f"the file entry_points.txt of {source.distribution} is damaged; reinstall it"
        raise Refused(msg)
    try:
        plugin = importlib.import_module(source.module)
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if source.module == missing or source.module.startswith(missing + "."):
            msg = (
                f"its module '{source.module}' is not there: the entry point is left over from a package that was "
                f"removed. Reinstall {source.distribution}, or uninstall it."
            )
        else:
            msg = f"it needs the module '{missing}', which is not installed"
        raise Refused(msg) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        msg = f"importing {source.module} raised {_describe(error)}"
        raise Refused(msg) from error
    for part in filter(None, source.target.partition(":")[2].strip().split(".")):
        if not hasattr(plugin, part):
            msg = f"{source.module} has no '{part}', which its entry point '{source.target}' names"
            raise Refused(msg)
        plugin = getattr(plugin, part)
    return plugin


def _api(plugin: Any) -> int:
    api = getattr(plugin, "PLUGIN_API", None)
    if type(api) is not int:
        seen = "states no PLUGIN_API" if api is None else f"states PLUGIN_API = {api!r}, which is not a whole number"
        msg = f"it {seen}; a plugin module needs the line PLUGIN_API = {PLUGIN_API}"
        raise Refused(msg)
    if api != PLUGIN_API and api not in _CHANGES:
        what = "the plugin is too old: update it" if api < PLUGIN_API else "mtb-core is too old: update that"
        msg = f"it was written for plugin API {api}, but this mtb-core has {PLUGIN_API}; {what}"
        raise Refused(msg)
    return api


#: For each older plugin API that is still read: what changed in the kinds that cannot be used as they are.
_CHANGES = {
    1: {
        "mtb_strategies": "Layout takes roles={'dp': 'data', …} in place of data=(…), optimizer_step returns True if it "
        "applied the update, and Prepared has no parameters",
        "mtb_models": "ModelSpec.tensor_parallel is called role",
        "mtb_run_plugins": "a wrapper of mtb_optimizer_step must return what it got, and micro-batches are inside "
        "mtb_accumulate",
    }
}


def _check_changes(api: int, hooks: Sequence[str]) -> None:
    """Refuse a plugin of an older API that provides a kind which has changed since, with what to change."""
    changed = {hook: text for hook, text in _CHANGES.get(api, {}).items() if hook in hooks}
    if changed:
        todo = "; ".join(f"{hook}: {text}" for hook, text in changed.items())
        msg = f"it was written for plugin API {api}, but this mtb-core has {PLUGIN_API}. Change: {todo}. Then set PLUGIN_API = {PLUGIN_API}"
        raise Refused(msg)


def _checked_manager(plugin: Any) -> pluggy.PluginManager:
    """A manager with this plugin alone, after pluggy checked its hooks' names and arguments."""
    manager = pluggy.PluginManager("mtb")
    manager.add_hookspecs(DiscoverySpecs)
    try:
        manager.register(plugin, "plugin")
    except pluggy.PluginValidationError as error:
        raise Refused(_argument_reason(plugin, error)) from error
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        if not caller.has_spec():
            raise Refused(_unknown_hook(caller.name))
    marked = {caller.name for caller in callers}
    for name, value in vars(plugin).items():
        own = inspect.isfunction(value) and value.__module__ == getattr(plugin, "__name__", plugin.__class__.__module__)
        if name.startswith("mtb_") and own and name not in marked:
            if name not in _DISCOVERY:
                raise Refused(_unknown_hook(name))
            msg = f"its function {name} is not marked as a hook; put @hookimpl (from mtb_core) above it"
            raise Refused(msg)
    return manager


_DISCOVERY = tuple(kind.hook for kind in KINDS)


def _unknown_hook(name: str) -> str:
    if hasattr(RunSpecs, name):
        return (
            f"it implements {name} at module level, but that is a hook of a run: put it on an object and name that in "
            "mtb_run_plugins"
        )
    return f"it implements the unknown hook '{name}'.{nearest(name, _DISCOVERY)} Valid: {', '.join(_DISCOVERY)}"


def _argument_reason(plugin: Any, error: pluggy.PluginValidationError) -> str:
    """Name the hook and its argument; pluggy's own text runs over several lines and shows objects."""
    for name in _DISCOVERY:
        function = getattr(plugin, name, None)
        taken = list(inspect.signature(function).parameters) if inspect.isroutine(function) else []
        if taken:
            return f"its hook {name} asks for the argument '{taken[0]}', but discovery hooks are called without any"
    return _one_line(str(error))


def _implemented(manager: pluggy.PluginManager, plugin: Any) -> tuple[str, ...]:
    found = {caller.name for caller in manager.get_hookcallers(plugin) or []}
    if not found:
        msg = f"it implements no hook; valid: {', '.join(_DISCOVERY)}"
        raise Refused(msg)
    return tuple(name for name in _DISCOVERY if name in found)


def _ask(manager: pluggy.PluginManager, kind: Kind) -> dict[str, Any]:
    try:
        results = getattr(manager.hook, kind.hook)()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        msg = f"its hook {kind.hook} raised {_describe(error)}"
        raise Refused(msg) from error
    answer: Any = results[0] if results else None
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        msg = f"its hook {kind.hook} returned {_short(answer)}; it must be a list of {kind.info.__name__}"
        raise Refused(msg)
    found: dict[str, Any] = {}
    for info in answer:
        if not isinstance(info, kind.info):
            msg = f"its hook {kind.hook} lists {_short(info)}; it must list {kind.info.__name__} values only"
            raise Refused(msg)
        _check_info(info, kind)
        if info.name in found:
            msg = f"it lists the {kind.singular} '{info.name}' twice"
            raise Refused(msg)
        found[info.name] = info
    return found


def _check_info(info: Any, kind: Kind) -> None:
    what = f"its {kind.singular} {info.name!r}"
    words = info.name.split() if isinstance(info.name, str) else []
    most = 2 if isinstance(info, CommandInfo) else 1
    if " ".join(words) != info.name or not 1 <= len(words) <= most or any(word[0] == "-" for word in words):
        msg = f"{what} needs a name that is one word and does not start with '-'"
        raise Refused(msg)
    if not isinstance(info.help, str):
        msg = f"{what} has the help text {_short(info.help)}; it must be one line of text"
        raise Refused(msg)
    if not callable(getattr(info, "plan", len)):
        msg = f"{what} has the plan {_short(info.plan)}; it must be a function plan(options, config, world)"
        raise Refused(msg)
    if not callable(getattr(info, "check", None) or len):
        msg = f"{what} has the check {_short(info.check)}; it must be a function check(options, config)"
        raise Refused(msg)
    options = getattr(info, "options", NoOptions)
    fields = attrs.fields(options) if inspect.isclass(options) and attrs.has(options) else None
    if fields is None or any("help" not in field.metadata for field in fields):
        msg = f"{what} has the options {_short(options)}; it must be an attrs class whose fields are made by option(…)"
        raise Refused(msg)


def _describe(error: BaseException) -> str:
    """``ValueError: text (file.py:12)``, in one line and without folders."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f" ({code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{trace.tb_lineno})"
        trace = trace.tb_next
    text = _one_line(str(error))
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(value: Any) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= 60 else text[:57] + "…"
