"""Tests of mtb_core.api.control, and of who may answer the hooks that act."""

import threading

import pytest

from mtb_core.api import Control, PluginError, Strategy, hookimpl
from mtb_core.api.control import Requests, RollBack
from mtb_core.registry.run_hooks import Hooks


def test_the_first_request_of_a_kind_counts():
    """Later ones of the same kind change nothing; those of other kinds stand beside it; what is taken is gone."""
    control = Control()
    for reason in ("first", "second"):
        control.finish(reason)
        control.stop(reason)
        control.skip(reason)
        control.roll_back(reason, before=3 if reason == "first" else 1)
        control.save()
    assert control.take() == Requests("first", "first", "first", save=True, back=RollBack("first", 3, None))
    assert control.take() == Requests()


class SlowRequests:
    """Requests in which a thread stays between looking and asking until `go`."""

    def __init__(self):
        self.looked, self.go, self.asked = threading.Event(), threading.Event(), None

    @property
    def skip(self):
        self.looked.set()
        self.go.wait(10)

    @skip.setter
    def skip(self, reason):
        self.asked = reason


def test_no_request_of_a_thread_is_lost():
    """What is taken while a thread is asking is taken after it has asked."""
    control, slow, taken = Control(), SlowRequests(), []
    control._requests = slow
    asking = threading.Thread(target=control.skip, args=("now",))
    taking = threading.Thread(target=lambda: taken.append(control.take().asked))
    asking.start()
    slow.looked.wait(10)
    taking.start()
    taking.join(0.2)
    slow.go.set()
    asking.join()
    taking.join()
    assert taken == ["now"]


def test_renewing_is_no_request():
    """It acts at once."""
    called = []
    control = Control(lambda: called.append(1))
    control.renew_weights()
    assert called == [1]
    assert control.take() == Requests()


class Gives:
    """A plugin with a metric, and a reason to leave out an update."""

    def __init__(self, metrics=None, reason=None):
        self._metrics, self._reason = metrics, reason

    @hookimpl
    def mtb_step_metrics(self):
        return self._metrics

    @hookimpl
    def mtb_before_update(self, step):
        return self._reason and f"{self._reason} {step}"


def test_metrics_of_run_plugins_are_put_together():
    """None gives none; a name that two of them give is an error that tells it."""
    plugins = {"a": Gives({"x": 1.0}), "b": Gives({"y": 2.0}), "c": Gives()}
    assert Hooks(Strategy(), plugins=plugins).step_metrics() == {"x": 1.0, "y": 2.0}
    with pytest.raises(PluginError, match=r"run plugin 'b' gives the step metric 'x', which another plugin gives too"):
        Hooks(Strategy(), plugins={"a": Gives({"x": 1.0}), "b": Gives({"x": 2.0})}).step_metrics()


def test_the_first_reason_to_leave_out_an_update_counts():
    """All run plugins are asked; None is no reason."""
    assert Hooks(Strategy()).before_update(4, 1.0, 2.0) is None
    plugins = {"a": Gives(), "b": Gives(reason="b"), "c": Gives(reason="c")}
    assert Hooks(Strategy(), plugins=plugins).before_update(4, 1.0, 2.0) == "b 4"


@pytest.mark.parametrize("hook", ["mtb_step_metrics", "mtb_before_update"])
def test_sinks_only_observe(hook):
    """A sink, which may be switched off on one rank, has no say in what all ranks must know alike."""
    sink = type("Sink", (), {hook: hookimpl(lambda self: None)})()
    with pytest.raises(PluginError, match=f"sink 's' implements {hook}, but sinks only observe"):
        Hooks(Strategy(), sinks={"s": sink})


def test_states_and_results_are_kept_by_plain_names():
    """A run plugin's under its name, a sink's beside it, though both have one name."""

    class Keeps:
        @hookimpl
        def mtb_plugin_state(self):
            return {"a": 1}

        @hookimpl
        def mtb_result(self):
            return {"b": 2}

    hooks = Hooks(Strategy(), plugins={"x": Keeps()}, sinks={"x": Keeps()})
    assert hooks.plugin_states(None) == {"x": {"a": 1}, "sink:x": {"a": 1}}
    assert hooks.results() == {"x": {"b": 2}, "sink:x": {"b": 2}}
