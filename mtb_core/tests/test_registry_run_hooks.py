"""Tests of mtb_core.registry.run_hooks."""

from contextlib import nullcontext

import pytest

from mtb_core.api import PluginError, RunInfo, Strategy, hookimpl
from mtb_core.registry.run_hooks import METHODS, OBSERVER_HOOKS, STRATEGY_HOOKS, Hooks


class Plain(Strategy):
    """Records its calls; hooks take and return stand-ins, which the facade hands through."""

    def __init__(self):
        self._calls = []

    def prepare(self, job):
        self._calls.append(("prepare", job))
        return f"prepared {job}"

    def micro_batch(self, prepared, micro):
        return nullcontext((prepared, micro))

    def backward(self, prepared, loss):
        self._calls.append(("backward", prepared, loss))

    def gradients(self, prepared):
        return [prepared]

    def optimizer_step(self, prepared, apply):
        self._calls.append(("optimizer_step", prepared, apply))
        return apply

    def state(self, prepared):
        return f"state of {prepared}"

    def state_loaded(self, prepared, state):
        self._calls.append(("state_loaded", prepared, state))

    def close(self, prepared):
        self._calls.append(("close", prepared))


#: Calls of the facade that tell observers something, by name of the hook.
TOLD = {
    "worker_started": ("ctx", "folder"),
    "phase": ("step", 3),
    "run_started": (RunInfo(None, None, None, 1, 2, 0, None),),
    "step_recorded": ("record",),
    "evaluated": (3, 0.5, 7),
    "checkpoint_published": ("path", 5),
    "fault_point": ("before-rename",),
    "run_finished": ("done",),
}


def make_observer(log, name, fails=()):
    """An observer of all hooks in TOLD that logs (name, hook, values), and raises in those that it `fails` in."""

    def note(hook, *values):
        log.append((name, hook, *values))
        if hook in fails:
            raise ValueError(f"{name} cannot")

    class Observer:
        @hookimpl
        def mtb_worker_started(self, ctx, folder):
            note("worker_started", ctx, folder)

        @hookimpl
        def mtb_phase(self, phase, step):
            note("phase", phase, step)

        @hookimpl
        def mtb_run_started(self, info):
            note("run_started", info)

        @hookimpl
        def mtb_step_recorded(self, record):
            note("step_recorded", record)

        @hookimpl
        def mtb_evaluated(self, global_step, loss, samples):
            note("evaluated", global_step, loss, samples)

        @hookimpl
        def mtb_checkpoint_published(self, path, step):
            note("checkpoint_published", path, step)

        @hookimpl
        def mtb_fault_point(self, name):
            note("fault_point", name)

        @hookimpl
        def mtb_run_finished(self, exit_reason):
            note("run_finished", exit_reason)

    return Observer()


def make_keeper(kept, loaded):
    """An observer whose state in a checkpoint is `kept` (raised, if it is an exception); what it gets is `loaded`."""

    class Keeper:
        @hookimpl
        def mtb_plugin_state(self, state):
            if isinstance(kept, Exception):
                raise kept
            return kept

        @hookimpl
        def mtb_plugin_state_loaded(self, state):
            if "bad" in state:
                raise KeyError("bad")
            loaded.append(state)

    return Keeper()


def refused(strategy, match, **others):
    with pytest.raises(PluginError, match=match):
        Hooks(strategy, **others)


def test_methods_are_the_hooks():
    """Every strategy hook has a method with a default, and no public method is anything else."""
    assert {f"mtb_{name}" for name in METHODS} == set(STRATEGY_HOOKS)
    assert {n for n in vars(Strategy) if not n.startswith("_")} == set(METHODS)


def test_strategy_is_called_without_decorators():
    """All strategy hooks reach the strategy's methods, and their values come back."""
    strategy = Plain()
    hooks = Hooks(strategy)
    assert hooks.prepare("job") == "prepared job"
    with hooks.micro_batch("p", "m") as seen:
        assert seen == ("p", "m")
    hooks.backward("p", "loss")
    assert hooks.gradients("p") == ["p"]
    hooks.optimizer_step("p", False)
    assert hooks.state("p") == "state of p"
    hooks.state_loaded("p", "s")
    hooks.close("p")
    assert strategy._calls == [
        ("prepare", "job"),
        ("backward", "p", "loss"),
        ("optimizer_step", "p", False),
        ("state_loaded", "p", "s"),
        ("close", "p"),
    ]


def test_sole_implementations_are_bound_directly():
    """Where nobody wraps, the facade calls the method itself; where somebody does, pluggy."""

    class Wrapper:
        @hookimpl(wrapper=True)
        def mtb_backward(self):
            return (yield)

    strategy = Plain()
    hooks = Hooks(strategy, plugins={"w": Wrapper()})
    assert hooks._gradients == strategy.gradients
    assert hooks._backward != strategy.backward


def test_arguments_may_be_left_out_or_reordered():
    """A method takes the arguments it wants, by name."""

    class Short(Plain):
        def backward(self, loss):
            self._calls.append(loss)

        def optimizer_step(self, apply, prepared):
            self._calls.append((apply, prepared))
            return apply

    strategy = Short()
    hooks = Hooks(strategy)
    hooks.backward("p", "loss")
    hooks.optimizer_step("p", True)
    assert strategy._calls == ["loss", (True, "p")]


def test_wrapping_a_strategy_hook():
    """A run plugin's wrapper sees the arguments and may replace what is returned."""

    class Wrapper:
        @hookimpl(wrapper=True)
        def mtb_prepare(self, job):
            prepared = yield
            return f"wrapped {prepared} for {job}"

    hooks = Hooks(Plain(), plugins={"w": Wrapper()})
    assert hooks.prepare("job") == "wrapped prepared job for job"
    assert hooks.describe()["mtb_prepare"] == ["run plugin 'w'", "strategy Plain"]


def test_unknown_public_method():
    """A misspelt method of a strategy is refused, with a suggestion; private ones and constants are not."""

    class Misspelt(Plain):
        GOOD = 1

        def _helper(self):
            pass

        def optimiser_step(self, prepared, apply):
            pass

    refused(Misspelt(), r"public method 'optimiser_step'.*Did you mean 'optimizer_step'\?")


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_unknown_static_method(kind):
    """Static and class methods are public methods too."""
    cls = type("Odd", (Plain,), {"helper": kind(lambda *_: None)})
    refused(cls(), "public method 'helper'")


def test_unknown_argument():
    """A strategy's method that asks for what there is not names the hook and the argument."""

    class Asking(Plain):
        def backward(self, prepared, loss, scale):
            pass

    refused(Asking(), "mtb_backward.*scale")


def test_defaults_are_refused():
    """A default would silently win over the value that core passes."""

    class Defaulting(Plain):
        def optimizer_step(self, prepared, apply=True):
            pass

    refused(Defaulting(), "argument 'apply' of mtb_optimizer_step has a default")


def test_no_strategy():
    """Something that is no `Strategy` is refused."""
    refused(object(), "not a subclass of mtb_core.Strategy")


@pytest.mark.parametrize("hook", ["mtb_prepare", "mtb_micro_batch", "mtb_gradients", "mtb_state"])
def test_none_is_refused_where_a_value_is_needed(hook):
    """A forgotten return is named, not met later as an AttributeError."""
    method = hook.removeprefix("mtb_")
    arguments = {"prepare": "job", "micro_batch": "prepared, micro"}.get(method, "prepared")
    cls = type("Forgetful", (Plain,), {method: eval(f"lambda self, {arguments}: None")})
    values = arguments.split(", ")
    with pytest.raises(PluginError, match=f"{hook} returned None"):
        getattr(Hooks(cls()), method)(*values)


def test_second_implementation_of_a_strategy_hook():
    """Only the strategy implements; both would run otherwise, since a hook without a result has no first one."""

    class Second:
        @hookimpl
        def mtb_optimizer_step(self, prepared, apply):
            pass

    refused(Plain(), r"run plugin 'second' implements mtb_optimizer_step.*wrapper=True", plugins={"second": Second()})


def test_observer_hooks_cannot_be_wrapped():
    """A wrapper around reporting could hold back what others are to see."""

    class Wrapper:
        @hookimpl(wrapper=True)
        def mtb_step_recorded(self, record):
            return (yield)

    refused(Plain(), "run plugin 'w' wraps mtb_step_recorded", plugins={"w": Wrapper()})


def test_sinks_only_observe():
    """A sink, whose failures are forgiven, must not stand in the way of training."""

    class Sink:
        @hookimpl(wrapper=True)
        def mtb_backward(self):
            return (yield)

    refused(Plain(), "sink 's' implements mtb_backward, but sinks only observe", sinks={"s": Sink()})


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"mtb_step_record": hookimpl(lambda self, record: None)}, "Did you mean 'mtb_step_recorded'"),
        ({"mtb_step_recorded": lambda self, record: None}, "is not marked as a hook"),
        ({"mtb_stepped": lambda self: None}, "unknown hook 'mtb_stepped'"),
        ({"mtb_step_recorded": hookimpl(lambda self, step: None)}, "mtb_step_recorded.*step"),
        ({"mtb_evaluated": hookimpl(lambda self, loss=0.0: None)}, "argument 'loss' of mtb_evaluated has a default"),
        ({}, "implements no run hook"),
    ],
)
def test_broken_observers(members, match):
    """Unknown, unmarked, missing hooks and wrong arguments of a sink or run plugin are refused by name."""
    for name, member in members.items():
        if callable(member):
            member.__name__ = name
    refused(Plain(), match, sinks={"s": type("Sink", (), members)()})
    refused(Plain(), match, plugins={"p": type("Plugin", (), members)()})


def test_observers_are_called_in_order():
    """Run plugins first, then sinks, each in the order given; all hooks with all arguments."""
    log = []
    plugins = {n: make_observer(log, n) for n in ("p1", "p2")}
    sinks = {n: make_observer(log, n) for n in ("s1", "s2")}
    hooks = Hooks(Plain(), sinks=sinks, plugins=plugins)
    for hook, values in TOLD.items():
        getattr(hooks, hook)(*values)
    assert log == [(name, hook, *values) for hook, values in TOLD.items() for name in ("p1", "p2", "s1", "s2")]
    assert all(hooks.describe()[f"mtb_{hook}"][0] == "run plugin 'p1'" for hook in TOLD)
    asked = {"mtb_plugin_state", "mtb_plugin_state_loaded", "mtb_step_metrics", "mtb_before_update", "mtb_result"}
    assert {f"mtb_{hook}" for hook in TOLD} | asked == set(OBSERVER_HOOKS)


def test_observers_may_leave_arguments_out():
    """An observer takes the arguments it wants, by name."""
    seen = []

    class Sink:
        @hookimpl
        def mtb_evaluated(self, samples, loss):
            seen.append((samples, loss))

    Hooks(Plain(), sinks={"s": Sink()}).evaluated(1, 0.5, 9)
    assert seen == [(9, 0.5)]


@pytest.mark.parametrize("error", [ValueError("disk full"), SystemExit(3)])
def test_a_failing_sink_is_switched_off(error):
    """One warning that names sink and cause; the others and the run go on; at the end it may still clean up."""
    log, warnings = [], []

    class Failing:
        @hookimpl
        def mtb_step_recorded(self, record):
            log.append(("failing", record))
            raise error

        @hookimpl
        def mtb_run_finished(self):
            log.append(("failing", "finished"))
            raise error

    hooks = Hooks(Plain(), sinks={"failing": Failing(), "good": make_observer(log, "good")}, warn=warnings.append)
    hooks.step_recorded(1)
    hooks.step_recorded(2)
    hooks.run_finished("done")
    assert [entry for entry in log if entry[0] == "failing"] == [("failing", 1), ("failing", "finished")]
    assert [entry for entry in log if entry[0] == "good"] == [
        ("good", "step_recorded", 1),
        ("good", "step_recorded", 2),
        ("good", "run_finished", "done"),
    ]
    assert len(warnings) == 1
    assert "sink 'failing' is switched off" in warnings[0]
    assert str(error) in warnings[0]


def test_a_failing_run_plugin_ends_the_run():
    """Its exception reaches the caller, after all others were told, so that sinks hear of the end."""
    log = []
    plugins = {"p": make_observer(log, "p", fails=("run_finished",)), "q": make_observer(log, "q")}
    hooks = Hooks(Plain(), plugins=plugins, sinks={"s": make_observer(log, "s")})
    with pytest.raises(ValueError, match="p cannot"):
        hooks.run_finished("done")
    assert [entry[0] for entry in log] == ["p", "q", "s"]


def test_default_warning_goes_to_the_log(caplog):
    """Without `warn`, the warning is a record of the logger 'mtb'."""
    hooks = Hooks(Plain(), sinks={"s": make_observer([], "s", fails=("step_recorded",))})
    hooks.step_recorded(None)
    assert [record.name for record in caplog.records] == ["mtb"]


def test_state_of_plugins():
    """Sinks and run plugins keep state by name; each gets its own back, and what nobody here wants is left alone."""
    loaded = []
    sinks = {"s": make_keeper({"rows": 3}, loaded), "nothing": make_keeper(None, [])}
    hooks = Hooks(Plain(), sinks=sinks, plugins={"s": make_keeper({"count": 1}, loaded)})
    states = hooks.plugin_states(None)
    assert states == {"s": {"count": 1}, "sink:s": {"rows": 3}}
    hooks.plugin_states_loaded({**states, "gone": {"x": 1}})
    assert loaded == [{"count": 1}, {"rows": 3}]
    hooks.plugin_states_loaded({"run plugin 's'": {"count": 2}})  # as older checkpoints name it
    assert loaded[2:] == [{"count": 2}]


def test_a_sink_whose_state_fails_is_switched_off():
    """Neither saving nor resuming fails by a sink; by a run plugin it does."""
    warnings = []
    sinks = {"bad": make_keeper(ValueError("no state"), []), "good": make_keeper({"rows": 3}, [])}
    hooks = Hooks(Plain(), sinks=sinks, warn=warnings.append)
    states = hooks.plugin_states(None)
    assert list(states.values()) == [{"rows": 3}]
    hooks.plugin_states_loaded({name: {"bad": 1} for name in states})
    assert hooks.plugin_states(None) == {}
    assert ["'bad'" in warnings[0], "'good'" in warnings[1], len(warnings)] == [True, True, 2]
    hooks = Hooks(Plain(), plugins={"bad": make_keeper(ValueError("no state"), [])})
    with pytest.raises(ValueError, match="no state"):
        hooks.plugin_states(None)


def test_a_fault_point_fails_the_save():
    """What is raised at a fault point reaches the save, also from a sink."""
    hooks = Hooks(Plain(), sinks={"s": make_observer([], "s", fails=("fault_point",))})
    with pytest.raises(ValueError, match="s cannot"):
        hooks.fault_point("before-rename")
