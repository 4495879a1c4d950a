"""Run hooks: who implements what in one trial of a run, and the typed facade through which core calls them.

Pluggy checks names and arguments, and calls what is wrapped. Two things are done here: a strategy hook that nobody
wraps is bound directly (a hook call costs more than many a strategy method), and observers are called one by one, so
that a sink that fails does not take the run with it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import pluggy

from mtb_core.api import (
    EvaluationWork,
    Job,
    Loss,
    MicroBatch,
    ObserverSpecs,
    Phase,
    PluginError,
    Prepared,
    RankContext,
    RunInfo,
    RunSpecs,
    Shards,
    State,
    StepRecord,
    StepWork,
    Strategy,
    StrategySpecs,
    nearest,
)

if TYPE_CHECKING:
    import torch


def _names(specs: type) -> tuple[str, ...]:
    return tuple(name for name in vars(specs) if name.startswith("mtb_"))


STRATEGY_HOOKS = _names(StrategySpecs)
OBSERVER_HOOKS = _names(ObserverSpecs)
#: Observer hooks whose answers change the run or its records; not for sinks, which may be switched off on one rank.
_PLUGINS_ONLY = ("mtb_step_metrics", "mtb_before_update")
#: Methods of a `Strategy`: ``prepare`` implements ``mtb_prepare``.
METHODS = tuple(name.removeprefix("mtb_") for name in STRATEGY_HOOKS)

_LOGGER = logging.getLogger("mtb")


class RunManager(pluggy.PluginManager):
    """A plugin manager to which a strategy's public methods are hook implementations, without a decorator."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> pluggy.HookimplOpts | None:
        """Options of the method `name` of `plugin` as a hook implementation; None where it is not one."""
        if not isinstance(plugin, Strategy):
            return super().parse_hookimpl_opts(plugin, name)
        if name not in METHODS:
            return None
        return {
            "specname": f"mtb_{name}",
            "trylast": True,
            "tryfirst": False,
            "wrapper": False,
            "hookwrapper": False,
            "optionalhook": False,
        }


@attrs.frozen
class _Observer:
    """One implementation of an observer hook.

    Attributes:
        name: for messages.
        key: under which its state and its result are recorded: the name of a run plugin, or ``sink:NAME``.
        sink: its name where it is a sink, whose failure is not the run's.
    """

    name: str
    key: str
    call: Callable[..., object]
    sink: str | None


class Hooks:
    """The run hooks of one trial on one rank; the only way core calls them.

    `sinks` and `plugins` are objects by name, whose methods are marked with ``hookimpl``. Observers are called in
    order, plugins first, then sinks; all are told before an exception of a plugin goes on to the caller. A sink that
    raises is switched off, with one call of `warn`; afterwards it is told of ``mtb_run_finished`` only, so that it can
    release what it holds.

    Raises:
        PluginError: something implements a hook that does not exist or is not its to implement.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        sinks: Mapping[str, object] | None = None,
        plugins: Mapping[str, object] | None = None,
        warn: Callable[[str], None] = _LOGGER.warning,
    ) -> None:
        self._warn = warn
        self._off: set[str] = set()
        manager = RunManager("mtb")
        manager.add_hookspecs(RunSpecs)
        label = f"strategy {type(strategy).__name__}"
        _check_strategy(strategy, label)
        _register(manager, strategy, label)
        owners: dict[int, str] = {}
        keys: dict[int, str] = {}
        # Pluggy calls the last one registered first.
        for name, sink in reversed([*(sinks or {}).items()]):
            _register(manager, sink, f"sink '{name}'")
            owners[id(sink)], keys[id(sink)] = name, f"sink:{name}"
        for name, plugin in reversed([*(plugins or {}).items()]):
            _register(manager, plugin, f"run plugin '{name}'")
            keys[id(plugin)] = name
        self._manager, hook = manager, manager.hook
        for name in STRATEGY_HOOKS:
            _check_strategy_hook(getattr(hook, name), strategy, owners)
        for name in _PLUGINS_ONLY:
            _refuse_sinks(getattr(hook, name), owners)
        self._prepare = _bind(hook.mtb_prepare)
        self._accumulate = _bind(hook.mtb_accumulate)
        self._evaluate = _bind(hook.mtb_evaluate)
        self._all_sum = _bind(hook.mtb_all_sum)
        self._micro_batch = _bind(hook.mtb_micro_batch)
        self._backward = _bind(hook.mtb_backward)
        self._gradients = _bind(hook.mtb_gradients)
        self._optimizer_step = _bind(hook.mtb_optimizer_step)
        self._state = _bind(hook.mtb_state)
        self._state_loaded = _bind(hook.mtb_state_loaded)
        self._close = _bind(hook.mtb_close)
        self._worker_started = _observers(hook.mtb_worker_started, owners, keys)
        self._phase = _observers(hook.mtb_phase, owners, keys)
        self._run_started = _observers(hook.mtb_run_started, owners, keys)
        self._step_metrics = _observers(hook.mtb_step_metrics, owners, keys)
        self._before_update = _observers(hook.mtb_before_update, owners, keys)
        self._step_recorded = _observers(hook.mtb_step_recorded, owners, keys)
        self._evaluated = _observers(hook.mtb_evaluated, owners, keys)
        self._checkpoint_published = _observers(hook.mtb_checkpoint_published, owners, keys)
        self._fault_point = _observers(hook.mtb_fault_point, owners, keys)
        self._plugin_state = _observers(hook.mtb_plugin_state, owners, keys)
        self._plugin_state_loaded = _observers(hook.mtb_plugin_state_loaded, owners, keys)
        self._result = _observers(hook.mtb_result, owners, keys)
        self._run_finished = _observers(hook.mtb_run_finished, owners, keys)

    def prepare(self, job: Job) -> Prepared:
        """See `StrategySpecs.mtb_prepare`; so for all below."""
        return cast("Prepared", _given(self._prepare(job=job), "mtb_prepare"))

    def accumulate(self, prepared: Prepared, work: StepWork) -> Loss:
        """All forwards and backwards of a step."""
        return cast("Loss", _given(self._accumulate(prepared=prepared, work=work), "mtb_accumulate"))

    def evaluate(self, prepared: Prepared, work: EvaluationWork) -> Loss | None:
        """All forwards of an evaluation."""
        return cast("Loss | None", self._evaluate(prepared=prepared, work=work))

    def all_sum(self, prepared: Prepared, vector: torch.Tensor) -> Callable[[], object]:
        """Begin to sum `vector` over all ranks; what waits for the end."""
        return cast("Callable[[], object]", _given(self._all_sum(prepared=prepared, vector=vector), "mtb_all_sum"))

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """The sync context of one micro-batch."""
        context = _given(self._micro_batch(prepared=prepared, micro=micro), "mtb_micro_batch")
        return cast("AbstractContextManager[None]", context)

    def backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """Backward of one micro-batch, inside its sync context."""
        self._backward(prepared=prepared, loss=loss)

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """This rank's gradients."""
        return cast("Sequence[Shards]", _given(self._gradients(prepared=prepared), "mtb_gradients"))

    def optimizer_step(self, prepared: Prepared, apply: bool) -> bool:
        """Apply the optimizer if `apply`; clear the gradients. Whether it was applied."""
        return bool(_given(self._optimizer_step(prepared=prepared, apply=apply), "mtb_optimizer_step"))

    def state(self, prepared: Prepared) -> State:
        """Model and optimizer as live views in global coordinates."""
        return cast("State", _given(self._state(prepared=prepared), "mtb_state"))

    def state_loaded(self, prepared: Prepared, state: State) -> None:
        """The pieces of `state` were filled."""
        self._state_loaded(prepared=prepared, state=state)

    def close(self, prepared: Prepared) -> None:
        """The trial has ended."""
        self._close(prepared=prepared)

    def worker_started(self, ctx: RankContext, folder: Path) -> None:
        """Tell observers that the rank is up."""
        self._tell(self._worker_started, ctx, folder)

    def phase(self, phase: Phase, step: int) -> None:
        """Tell observers of the phase that begins."""
        if self._phase:
            self._tell(self._phase, phase, step)

    def run_started(self, info: RunInfo) -> None:
        """Tell observers that the first step is next. Sinks cannot act on the run."""
        told = attrs.evolve(info, control=None)
        self._tell([o for o in self._run_started if o.sink is None], info)
        self._tell([o for o in self._run_started if o.sink is not None], told)

    @property
    def gives_step_metrics(self) -> bool:
        """True if a run plugin has ``mtb_step_metrics``."""
        return bool(self._step_metrics)

    def step_metrics(self) -> dict[str, float]:
        """Figures of run plugins for the step's record.

        Raises:
            PluginError: two of them give a figure of the same name.
        """
        figures: dict[str, float] = {}
        for observer in self._step_metrics:
            found = cast("Mapping[str, float] | None", observer.call()) or {}
            if twice := figures.keys() & found.keys():
                raise PluginError(
                    f"{observer.name} gives the step metric '{min(twice)}', which another plugin gives too."
                )
            figures.update(found)
        return figures

    def before_update(self, step: int, loss: float, grad_norm: float) -> str | None:
        """The first reason of a run plugin to leave out the update of `step`; all are asked."""
        if not self._before_update:
            return None
        reasons = [observer.call(step, loss, grad_norm) for observer in self._before_update]
        return next((str(reason) for reason in reasons if reason is not None), None)

    def step_recorded(self, record: StepRecord) -> None:
        """Tell observers of a step."""
        self._tell(self._step_recorded, record)

    def evaluated(self, global_step: int, loss: float, samples: int) -> None:
        """Tell observers of an evaluation."""
        self._tell(self._evaluated, global_step, loss, samples)

    def checkpoint_published(self, path: Path, step: int) -> None:
        """Tell observers that a checkpoint is durable."""
        self._tell(self._checkpoint_published, path, step)

    def fault_point(self, name: str) -> None:
        """Tell observers where a save is; what they raise is for the save to handle."""
        for observer in self._fault_point:
            observer.call(name)

    @property
    def keeps_plugin_state(self) -> bool:
        """True if a sink or run plugin has ``mtb_plugin_state``."""
        return bool(self._plugin_state)

    def plugin_states(self, state: State) -> dict[str, Any]:
        """The states of sinks and run plugins, by name: a `State`, or JSON values."""
        states = {observer.key: self._ask(observer, state) for observer in self._plugin_state}
        return {name: given for name, given in states.items() if given is not None}

    def plugin_states_loaded(self, states: Mapping[str, Any]) -> None:
        """Give sinks and run plugins the JSON values that they had saved; those of plugins not here are left alone."""
        for observer in self._plugin_state_loaded:
            # Checkpoints of plugin API 1 have them under the name that messages use.
            for key in (observer.key, observer.name):
                if key in states:
                    self._ask(observer, states[key])
                    break

    def results(self) -> dict[str, Any]:
        """Values of sinks and run plugins for the result, by name."""
        found = {observer.key: self._ask(observer) for observer in self._result}
        return {name: values for name, values in found.items() if values is not None}

    def run_finished(self, exit_reason: str) -> None:
        """Tell observers that the trial has ended."""
        self._tell(self._run_finished, exit_reason, last=True)

    def describe(self) -> dict[str, list[str]]:
        """Implementers of each run hook in the order of their calls, wrappers first."""
        callers = ((name, getattr(self._manager.hook, name)) for name in (*STRATEGY_HOOKS, *OBSERVER_HOOKS))
        return {name: [impl.plugin_name for impl in reversed(caller.get_hookimpls())] for name, caller in callers}

    def _tell(self, observers: Sequence[_Observer], *values: object, last: bool = False) -> None:
        first: Exception | None = None
        for observer in observers:
            off = observer.sink in self._off
            if off and not last:
                continue
            try:
                observer.call(*values)
            except (Exception, SystemExit) as error:
                if observer.sink is not None:
                    self._switch_off(observer.sink, error)
                elif isinstance(error, SystemExit):
                    raise
                elif first is None:
                    first = error
        if first is not None:
            raise first

    def _ask(self, observer: _Observer, *values: object) -> object:
        """Answer of one observer; None for a sink that is switched off, or fails now."""
        if observer.sink in self._off:
            return None
        try:
            return observer.call(*values)
        except (Exception, SystemExit) as error:
            if observer.sink is None:
                raise
            self._switch_off(observer.sink, error)
            return None

    def _switch_off(self, sink: str, error: BaseException) -> None:
        if sink not in self._off:
            self._off.add(sink)
            self._warn(
                f"sink '{sink}' is switched off for the rest of the run: it raised {type(error).__name__}: {error}"
            )


def _given(value: object, hook: str) -> object:
    if value is None:
        msg = f"The hook {hook} returned None; the strategy, or what wraps it, must return a value, see its documentation."
        raise PluginError(msg)
    return value


def _check_strategy(strategy: Strategy, label: str) -> None:
    if not isinstance(strategy, Strategy):
        msg = f"{label} is not a subclass of mtb_core.Strategy; make it one."
        raise PluginError(msg)
    cls = type(strategy)
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if (
            name.startswith("_")
            or name in METHODS
            or not (inspect.isroutine(method) or isinstance(method, classmethod))
        ):
            continue
        msg = (
            f"{label} has the public method '{name}', which is no strategy hook.{nearest(name, METHODS)} "
            f"Valid: {', '.join(METHODS)}; start the names of helper methods with '_'."
        )
        raise PluginError(msg)


def _register(manager: RunManager, plugin: object, label: str) -> None:
    """Register `plugin`, with messages that name the hook and the argument."""
    try:
        manager.register(plugin, label)
    except pluggy.PluginValidationError as error:
        raise PluginError(f"{label}: {' '.join(str(error).split())}") from error
    callers = manager.get_hookcallers(plugin) or []
    known = (*STRATEGY_HOOKS, *OBSERVER_HOOKS)
    marked = {caller.name for caller in callers}
    unmarked = [] if isinstance(plugin, Strategy) else [n for n in dir(type(plugin)) if n.startswith("mtb_")]
    for name in [*(c.name for c in callers if not c.has_spec()), *(n for n in unmarked if n not in marked)]:
        if name in known:
            msg = f"{label}: its method {name} is not marked as a hook; put @hookimpl (from mtb_core) above it."
        else:
            msg = f"{label} implements the unknown hook '{name}'.{nearest(name, known)} Valid: {', '.join(known)}."
        raise PluginError(msg)
    if not callers:
        msg = f"{label} ({type(plugin).__name__}) implements no run hook. Valid: {', '.join(known)}."
        raise PluginError(msg)
    for caller in callers:
        _check_implementation(caller, plugin, label)


def _check_implementation(caller: pluggy.HookCaller, plugin: object, label: str) -> None:
    for impl in (i for i in caller.get_hookimpls() if i.plugin is plugin):
        # Pluggy passes no argument that has a default, so the default would always be used.
        defaults = [name for name in impl.kwargnames if name in _arguments(caller)]
        if defaults:
            msg = f"{label}: the argument '{defaults[0]}' of {caller.name} has a default and would never be passed; remove it."
            raise PluginError(msg)
        if caller.name in OBSERVER_HOOKS and _wraps(impl):
            msg = f"{label} wraps {caller.name}, but that hook only observes; implement it without wrapper=True."
            raise PluginError(msg)


def _check_strategy_hook(caller: pluggy.HookCaller, strategy: Strategy, sinks: Mapping[int, str]) -> None:
    for impl in caller.get_hookimpls():
        if impl.plugin is strategy:
            continue
        if id(impl.plugin) in sinks:
            msg = f"{impl.plugin_name} implements {caller.name}, but sinks only observe; a run plugin may wrap it."
            raise PluginError(msg)
        if not _wraps(impl):
            msg = (
                f"{impl.plugin_name} implements {caller.name}, which belongs to the strategy; others may only wrap it: "
                "mark the method with @hookimpl(wrapper=True)."
            )
            raise PluginError(msg)


def _refuse_sinks(caller: pluggy.HookCaller, sinks: Mapping[int, str]) -> None:
    for impl in caller.get_hookimpls():
        if id(impl.plugin) in sinks:
            msg = f"{impl.plugin_name} implements {caller.name}, but sinks only observe; a run plugin may implement it."
            raise PluginError(msg)


def _wraps(impl: pluggy.HookImpl) -> bool:
    return bool(impl.wrapper or impl.hookwrapper)


def _arguments(caller: pluggy.HookCaller) -> tuple[str, ...]:
    assert caller.spec is not None
    return tuple(caller.spec.argnames)


def _bind(caller: pluggy.HookCaller) -> Callable[..., object]:
    """Callable for a strategy hook: the method itself if nothing wraps it and it takes every argument."""
    impls = caller.get_hookimpls()
    if len(impls) == 1 and set(impls[0].argnames) == set(_arguments(caller)):
        return impls[0].function
    return caller


def _observers(caller: pluggy.HookCaller, sinks: Mapping[int, str], keys: Mapping[int, str]) -> tuple[_Observer, ...]:
    arguments = _arguments(caller)
    return tuple(
        _Observer(impl.plugin_name, keys[id(impl.plugin)], _positional(impl, arguments), sinks.get(id(impl.plugin)))
        for impl in reversed(caller.get_hookimpls())
    )


def _positional(impl: pluggy.HookImpl, arguments: tuple[str, ...]) -> Callable[..., object]:
    """A callable of all the hook's arguments by position, whichever of them `impl` takes and in which order."""
    function = impl.function
    if tuple(impl.argnames) == arguments:
        return function
    taken = [arguments.index(name) for name in impl.argnames]
    return lambda *values: function(*(values[index] for index in taken))
