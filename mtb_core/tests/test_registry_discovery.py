"""Tests of mtb_core.registry.discovery and loading: no plugin can break what is not its own."""

import pytest

from mtb_core.api import ConfigError, PluginError
from mtb_core.registry import discovery
from mtb_core.registry.discovery import discover, warn_failed


def record_of(name, registry=None):
    return next(r for r in (registry or discover()).records if r.name == name)


def test_core_alone(monkeypatch):
    """Core comes first, is active, and provides what every run needs."""
    registry = discover()
    assert registry.records[0].name == "core"
    assert registry.records[0].status == "active"
    assert {"console", "jsonl"} <= set(registry.sinks)
    assert ("core", registry.records[0].version) == registry.plugins_in_use()[0]
    assert registry.strategy("single").impl == "mtb_core.builtin.single:Single"
    assert registry.model("gpt")
    assert registry.dataset("synthetic")
    assert registry.sink("jsonl")
    assert registry.command("train")


def test_a_plugin_provides(install, strategy_body):
    """What a plugin describes is found by name, and its record says where it came from."""
    install(strategy_body("quick"), entry="fast", dist="mtb-fast", version="2.5")
    registry = discover()
    record = record_of("fast", registry)
    assert registry.strategy("quick").help == "A test's."
    assert registry.provider("strategies", "quick") == record
    assert (record.distribution, record.version, record.api, record.status) == ("mtb-fast", "2.5", 2, "active")
    assert record.hooks == ("mtb_strategies",)
    assert record.as_json()["strategies"] == ["quick"]
    assert ("fast", "2.5") in registry.plugins_in_use()


def test_an_object_can_be_a_plugin(install):
    """An entry point may name an object of a module."""
    install(
        """
        class Plugin:
            PLUGIN_API = 2

            @hookimpl
            def mtb_models(self):
                return [ModelInfo("tiny", "A test's.", "a:b")]

        plugin = Plugin()
        """,
        target="{module}:plugin",
    )
    assert discover().model("tiny")


HOOK = "@hookimpl\ndef mtb_sinks(): return {}\n"

BROKEN = {
    "import error": ("raise ImportError('no such symbol')", "ImportError: no such symbol (fake_plugin_"),
    "any exception": ("1 / 0", "ZeroDivisionError"),
    "sys.exit": ("raise SystemExit(5)", "SystemExit: 5"),
    "missing dependency": ("import not_installed_anywhere", "needs the module 'not_installed_anywhere'"),
    "no API": (HOOK.format([]) + "del PLUGIN_API", "states no PLUGIN_API"),
    "old API": ("PLUGIN_API = 0", "plugin API 0, but this mtb-core has 2; the plugin is too old"),
    "new API": ("PLUGIN_API = 99", "plugin API 99, but this mtb-core has 2; mtb-core is too old"),
    "odd API": ("PLUGIN_API = '1'", "'1', which is not a whole number"),
    "no hooks": ("", "implements no hook"),
    "unknown hook": ("@hookimpl\ndef mtb_strategys(): pass", "'mtb_strategys'. Did you mean 'mtb_strategies'?"),
    "unmarked hook": ("def mtb_sinks(): return []", "mtb_sinks is not marked as a hook"),
    "unmarked unknown hook": ("def mtb_sink(): return []", "'mtb_sink'. Did you mean 'mtb_sinks'?"),
    "run hook": ("@hookimpl\ndef mtb_step_recorded(record): pass", "mtb_run_plugins"),
    "unknown argument": ("@hookimpl\ndef mtb_sinks(config): return []", "mtb_sinks asks for the argument 'config'"),
    "raising hook": ("@hookimpl\ndef mtb_sinks(): raise KeyError('boom')", "mtb_sinks raised KeyError: 'boom'"),
    "exiting hook": ("@hookimpl\ndef mtb_sinks(): raise SystemExit", "mtb_sinks raised SystemExit"),
    "None": (HOOK.format(None), "mtb_sinks returned None; it must be a list of SinkInfo"),
    "not a list": (HOOK.format(3), "mtb_sinks returned 3"),
    "wrong element": (HOOK.format(["csv"]), "mtb_sinks lists 'csv'; it must list SinkInfo values only"),
    "wrong kind": (HOOK.format("[ModelInfo('a', 'b', 'c:d')]"), "lists ModelInfo("),
    "bad reference": (HOOK.format("[SinkInfo('a', 'b', 'c')]"), "impl must be 'package.module:name'"),
    "bad name": (HOOK.format("[SinkInfo('a b', 'b', 'c:d')]"), "'a b' needs a name that is one word"),
    "bad help": (HOOK.format("[SinkInfo('a', None, 'c:d')]"), "help text None"),
    "bad options": (HOOK.format("[SinkInfo('a', 'b', 'c:d', dict)]"), "must be an attrs class"),
    "twice": (HOOK.format("[SinkInfo('a', 'b', 'c:d')] * 2"), "lists the sink 'a' twice"),
    "bad plan": (
        "@hookimpl\ndef mtb_strategies(): return [StrategyInfo('a', 'b', 'c:d', 'plan')]",
        "has the plan 'plan'; it must be a function",
    ),
    "bad check": (
        "@hookimpl\ndef mtb_run_plugins(): return [RunPluginInfo('a', 'b', 'c:d', check='check')]",
        "has the check 'check'; it must be a function",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_recorded(case, install, strategy_body):
    """Whatever a plugin does wrong is recorded with its cause, and the plugin beside it works."""
    body, reason = BROKEN[case]
    install(body, entry="broken", dist="mtb-broken", version="0.3")
    install(strategy_body("healthy"), entry="zz", dist="mtb-zz")
    registry = discover()
    record = record_of("broken", registry)
    assert (record.status, record.distribution, record.version) == ("failed", "mtb-broken", "0.3")
    assert reason in record.reason
    assert "\n" not in record.reason
    assert registry.strategy("healthy")
    assert ("broken", "0.3") not in registry.plugins_in_use()


def test_stale_entry_point(install):
    """An entry point whose package was removed says so."""
    install(entry="gone", dist="mtb-gone", target="removed_package.plugin")
    assert "left over from a package that was removed" in record_of("gone").reason


def test_missing_object(install):
    """An entry point that names an object its module has not says so."""
    install(entry="x", target="{module}:absent")
    assert "has no 'absent'" in record_of("x").reason


def test_damaged_entry_points(install):
    """A distribution with a damaged entry_points.txt fails alone."""
    install(dist="mtb-damaged", entry_points="[mtb]\nnonsense\n")
    assert "damaged" in record_of("nonsense").reason


def test_ctrl_c_passes(install):
    """Ctrl-C while a plugin is imported ends the command."""
    install("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover()


def test_stdout_is_kept_clean(install, capsys):
    """What a plugin prints while it is loaded goes to stderr; stdout may have to be one JSON document."""
    install("print('hello from the plugin')\n" + HOOK.format([]))
    assert record_of("x").status == "active"
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello from the plugin" in captured.err


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        ("@hookimpl\ndef mtb_commands(): return [CommandInfo('train', 'x', 'a:b')]", "command 'train'"),
        ("@hookimpl\ndef mtb_sinks(): return [SinkInfo('jsonl', 'x', 'a:b')]", "sink 'jsonl'"),
        ("@hookimpl\ndef mtb_models(): return [ModelInfo('gpt', 'x', 'a:b')]", "model 'gpt'"),
        ("@hookimpl\ndef mtb_datasets(): return [DatasetInfo('synthetic', 'x', 'a:b')]", "data set 'synthetic'"),
        ("@hookimpl\ndef mtb_optimizers(): return [OptimizerInfo('adamw', 'x', 'a:b')]", "optimizer 'adamw'"),
    ],
)
def test_core_names_win(body, taken, install):
    """A plugin that takes a name of core is refused, and core's stays."""
    install(body, entry="aaa", dist="mtb-aaa")
    record = record_of("aaa")
    assert record.status == "failed"
    assert f"the {taken} is provided by mtb-core already" in record.reason
    assert "mtb-aaa" in record.reason
    assert discover().command("train").impl == "mtb_core.cli.train:train"


def test_of_two_plugins_the_later_is_refused_as_a_whole(install, strategy_body):
    """Two plugins with one strategy: the first in the order keeps it, the reason names both distributions."""
    later = strategy_body("same") + "@hookimpl\ndef mtb_sinks(): return [SinkInfo('extra', 'x', 'a:b')]"
    install(later, entry="second", dist="mtb-second")
    install(strategy_body("same"), entry="first", dist="mtb-first")
    registry = discover()
    record = record_of("second", registry)
    assert record_of("first", registry).status == "active"
    assert record.status == "failed"
    assert "mtb-first" in record.reason
    assert "mtb-second" in record.reason
    assert "extra" not in registry.sinks
    with pytest.raises(PluginError, match=r"no sink 'extra' now.*mtb-first"):
        registry.sink("extra")


def test_entry_point_names_are_unique(install, strategy_body):
    """Two distributions with the same entry point name: the later one is refused; 'core' is taken."""
    install(strategy_body("one"), entry="same", dist="mtb-1")
    install(strategy_body("two"), entry="same", dist="mtb-2")
    install(strategy_body("three"), entry="core", dist="mtb-3")
    statuses = {r.distribution: r.status for r in discover().records}
    assert (statuses["mtb-1"], statuses["mtb-2"], statuses["mtb-3"]) == ("active", "failed", "failed")


@pytest.mark.parametrize("name", ["off", "mtb-off"])
def test_disabled_by_argument(name, install, strategy_body):
    """A plugin that is switched off, by entry point or distribution, is not imported; naming what it is tells why."""
    install("raise AssertionError('imported')", entry="off", dist="mtb-off")
    registry = discover(disabled=[name])
    assert record_of("off", registry).status == "disabled"
    with pytest.raises(PluginError, match="is disabled: switched off by --no-plugin"):
        registry.strategy("off")


def test_disabled_by_environment(install, monkeypatch):
    """MTB_DISABLE_PLUGINS takes names with commas; unknown ones do no harm."""
    install("raise AssertionError('imported')", entry="off", dist="mtb-off")
    monkeypatch.setenv("MTB_DISABLE_PLUGINS", "not-there, off,")
    assert record_of("off").status == "disabled"
    assert "MTB_DISABLE_PLUGINS" in record_of("off").reason


def test_disabling_what_is_not_there(install, strategy_body):
    """--no-plugin with an unknown name is refused with a suggestion."""
    install(strategy_body("s"), entry="profiler", dist="mtb-profiler")
    with pytest.raises(ConfigError, match=r"'profilr'.*Did you mean 'profiler'\?.*Valid: "):
        discover(disabled=["profilr"])


def test_core_cannot_be_disabled(monkeypatch):
    """Core holds what every run needs."""
    with pytest.raises(ConfigError, match="cannot be switched off"):
        discover(disabled=["core"])
    monkeypatch.setenv("MTB_DISABLE_PLUGINS", "mtb-core")
    with pytest.raises(ConfigError, match="cannot be switched off"):
        discover()


def test_unknown_name():
    """A misspelt strategy gets a suggestion and the list of those there are."""
    with pytest.raises(PluginError, match=r"Unknown strategy 'singel'\. Did you mean 'single'\? Valid: single"):
        discover().strategy("singel")


def test_unknown_name_mentions_what_could_not_be_loaded(install):
    """The name may be a broken plugin's under which it is not known; its reason is part of the message."""
    install("raise ImportError('libfoo.so.1')", entry="broken", dist="mtb-broken")
    with pytest.raises(PluginError, match=r"libfoo\.so\.1"):
        discover().strategy("zero99")


def test_naming_a_broken_plugin(install):
    """Asking for a failed plugin gives the recorded cause."""
    install("raise ImportError('libfoo.so.1')", entry="broken", dist="mtb-broken", version="1.0")
    expected = r"no strategy 'broken' now: plugin 'broken' \(mtb-broken 1\.0\) could not be loaded: .*libfoo"
    with pytest.raises(PluginError, match=expected):
        discover().strategy("broken")


def test_strict(install, monkeypatch):
    """MTB_STRICT_PLUGINS=1 makes any failed plugin an error, unless the caller looks at failures itself."""
    install("raise ImportError('boom')", entry="broken")
    monkeypatch.setenv("MTB_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError, match=r"MTB_STRICT_PLUGINS is 1.*boom"):
        discover()
    assert discover(strict=False).failed


def test_warned_once(install, monkeypatch):
    """Each failed plugin is warned of once a process, in one line that names entry point and distribution."""
    monkeypatch.setattr(discovery, "_warned", set())
    install("raise ImportError('boom')", entry="broken", dist="mtb-broken")
    said = []
    warn_failed(discover(), said.append)
    warn_failed(discover(), said.append)
    ours = [text for text in said if "broken" in text]
    assert len(ours) == 1
    assert "plugin 'broken' (mtb-broken 1.0)" in ours[0]
    assert "boom" in ours[0]
    assert "\n" not in ours[0]


def test_remembered(install, strategy_body):
    """Within a process a plugin is asked once."""
    install(strategy_body("s"))
    assert discover() is discover()
