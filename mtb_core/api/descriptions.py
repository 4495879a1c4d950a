"""Discovery: small, torch-free descriptions of what a plugin provides. The code they name is imported when used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from .options import NoOptions

if TYPE_CHECKING:
    from mtb_core.config.schema import TrainConfig

    from .layout import World
    from .values import Plan


def _reference(instance: Any, attribute: Any, value: str) -> None:
    module, _, name = value.partition(":")
    if not module or not name:
        msg = f"{type(instance).__name__} '{instance.name}': {attribute.name} must be 'package.module:name', got {value!r}"
        raise ValueError(msg)


def load_reference(reference: str) -> Any:
    """The object that ``"package.module:name"`` names; imports the module."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def construct(info: Any, options: Any, *arguments: Any) -> Any:
    """Call the `impl` of `info` with `arguments`, and with `options` after them if it declares any."""
    make = load_reference(info.impl)
    return make(*arguments) if info.options is NoOptions else make(*arguments, options)


@attrs.frozen
class StrategyInfo:
    """A parallel strategy.

    Attributes:
        name: what ``--strategy`` takes.
        help: one line.
        impl: ``"package.module:Class"``, a `Strategy`.
        plan: ``plan(options, config, world)``: torch-free and pure; raises `ConfigError` for what cannot be.
        options: its options class.
        legacy: kept for comparison and migration.
        preload: ``"package.module:function"``: ``function(device)`` imports what the implementation needs; for whoever
            forks many short runs from one process, as the conformance kit does. Empty: importing `impl` is enough.
    """

    name: str
    help: str
    impl: str = attrs.field(validator=_reference)
    plan: Callable[[Any, TrainConfig, World], Plan]
    options: type = NoOptions
    legacy: bool = False
    preload: str = ""


@attrs.frozen
class CommandInfo:
    """A command of ``mtb``; `impl` is a click command or group. `group` is its heading in ``mtb --help``.

    The name ``"plugins check"`` adds a command ``check`` to core's group `plugins`.
    """

    name: str
    help: str
    impl: str = attrs.field(validator=_reference)
    group: str = "Plugin commands"


@attrs.frozen
class SinkInfo:
    """A sink for metrics; `impl` is a class, made as ``Class(options)`` on every rank, with run hooks as methods."""

    name: str
    help: str
    impl: str = attrs.field(validator=_reference)
    options: type = NoOptions


@attrs.frozen
class RunPluginInfo:
    """An object that observes, wraps or acts on runs; made on every rank as ``Class(options)``, or ``Class()`` without.

    Attributes:
        name: the part before the dot in ``--plugin-opt NAME.KEY=VALUE``.
        help: one line.
        impl: ``"package.module:Class"``; its methods, marked with ``hookimpl``, implement or wrap run hooks.
        options: its options class.
        always: it takes part in every run. Otherwise it takes part where one of its options is given. None: always if
            it has no options.
        check: ``check(options, config)``, called before any rank starts where it takes part: torch-free and pure; raises
            `ConfigError` for what cannot be. None: nothing to check.
    """

    name: str
    help: str
    impl: str = attrs.field(validator=_reference)
    options: type = NoOptions
    always: bool | None = None
    check: Callable[[Any, TrainConfig], None] | None = None


@attrs.frozen
class ModelInfo:
    """A named model; `impl` is a function ``(config: TrainConfig) -> ModelSpec``, or ``(config, options)`` with options."""

    name: str
    help: str
    impl: str = attrs.field(validator=_reference)
    options: type = NoOptions


@attrs.frozen
class DatasetInfo:
    """A named data set; `impl` is a function ``(config) -> mtb_core.data.Dataset``, or ``(config, options)`` with options."""

    name: str
    help: str
    impl: str = attrs.field(validator=_reference)
    options: type = NoOptions


@attrs.frozen
class OptimizerInfo:
    """An optimizer; `impl` is a function ``(config, device) -> OptimizerRecipe``, or ``(config, device, options)``.

    `device` is ``"cpu"`` or ``"cuda:N"``.
    """

    name: str
    help: str
    impl: str = attrs.field(validator=_reference)
    options: type = NoOptions


@attrs.frozen
class ScheduleInfo:
    """A learning-rate schedule; `impl` is a function ``(config) -> schedule``, or ``(config, options)`` with options.

    ``schedule(step)`` is the rate of the step that follows `step` completed ones: a pure function of one number.
    """

    name: str
    help: str
    impl: str = attrs.field(validator=_reference)
    options: type = NoOptions


@attrs.frozen
class FormatInfo:
    """A checkpoint format: how tensors lie in files; `impl` is a class `mtb_core.ckpt.Storage`, made as ``Class()``."""

    name: str
    help: str
    impl: str = attrs.field(validator=_reference)


@attrs.frozen
class LauncherInfo:
    """Starts ranks; `impl` is a function ``(spec: LaunchSpec) -> LaunchOutcome``, see `mtb_core.launch`."""

    name: str
    help: str
    impl: str = attrs.field(validator=_reference)


@attrs.frozen
class EvidenceInfo:
    """A way to vouch for the figures of runs; `impl` is a subclass of `Evidence`, made as ``Class()``."""

    name: str
    help: str
    impl: str = attrs.field(validator=_reference)


@attrs.frozen
class DoctorCheck:
    """A check of ``mtb doctor``; `impl` is a function ``() -> DoctorResult``."""

    name: str
    help: str
    impl: str = attrs.field(validator=_reference)


@attrs.frozen
class DoctorResult:
    """Outcome of a check: `ok` True, False (a problem), or None (does not apply here); `detail` says what was seen."""

    ok: bool | None
    detail: str
