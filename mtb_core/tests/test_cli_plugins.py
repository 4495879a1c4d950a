"""Tests of mtb_core.cli.plugins."""

import json

import pytest

from mtb_core.cli import main

WITH_OPTIONS = """
import attrs

@attrs.frozen
class Options:
    size: int = option(25, help="How large.", minimum=1)
    mode: str = option("fast", help="Which way.", choices=("fast", "safe"))
    force: bool = option(False, help="Whatever happens.")
    label: str | None = option(None, help="A name.")

@hookimpl
def mtb_strategies():
    return [StrategyInfo("shiny", "A test's strategy.", "a.b:C", lambda *_: None, Options, legacy=True)]

@hookimpl
def mtb_sinks():
    return [SinkInfo("shiny", "A test's sink.", "a.b:D", Options), SinkInfo("dull", "No options.", "a.b:E")]
"""


def test_list(install, capsys):
    """The table names plugin, distribution, version, API, status and what is provided, and why a plugin failed."""
    install(WITH_OPTIONS, entry="shine", dist="mtb-shine", version="4.5")
    install("raise ImportError('no such symbol')", entry="broken", dist="mtb-broken")
    install("", entry="off", dist="mtb-off")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTB_DISABLE_PLUGINS", "off")
        assert main(["plugins", "list"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split(maxsplit=5)[1:] for line in out.splitlines() if line}
    assert lines["NAME"] == ["DISTRIBUTION", "VERSION", "API", "STATUS", "PROVIDES"]
    assert lines["shine"] == ["mtb-shine", "4.5", "2", "active", "strategies: shiny; sinks: shiny, dull"]
    assert lines["broken"] == ["mtb-broken", "1.0", "-", "failed", "see below"]
    assert lines["off"] == ["mtb-off", "1.0", "-", "disabled", "switched off by MTB_DISABLE_PLUGINS"]
    assert "plugin 'broken' (mtb-broken 1.0) could not be loaded: importing" in out
    assert "no such symbol" in out


def test_list_json(install, capsys):
    """One JSON document with a row for each plugin; every kind is a key."""
    install(WITH_OPTIONS, entry="shine", dist="mtb-shine", version="4.5")
    assert main(["plugins", "list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    rows = {row["name"]: row for row in document["plugins"]}
    assert rows["shine"] == {
        "name": "shine",
        "distribution": "mtb-shine",
        "version": "4.5",
        "api": 2,
        "status": "active",
        "reason": None,
        "hooks": ["mtb_strategies", "mtb_sinks"],
        "strategies": ["shiny"],
        "commands": [],
        "sinks": ["shiny", "dull"],
        "run_plugins": [],
        "models": [],
        "datasets": [],
        "checkpoint_formats": [],
        "optimizers": [],
        "schedules": [],
        "launchers": [],
        "evidence": [],
        "doctor_checks": [],
    }
    assert set(rows["core"]) == set(rows["shine"])


def test_show_options(install, capsys):
    """What has the name is shown, whatever its kind, with options, their types, defaults and choices."""
    install(WITH_OPTIONS, entry="shine", dist="mtb-shine", version="4.5")
    assert main(["plugins", "show", "shiny"]) == 0
    strategy, sink = capsys.readouterr().out.split("\nsink shiny")
    for text in (
        "strategy shiny: A test's strategy.",
        "plugin 'shine' (mtb-shine 4.5)",
        "a.b:C",
        "legacy",
        "size (int, default 25)\n        How large.",
        "mode (str, default fast; one of fast, safe)",
        "force (bool, default false)",
        "label (str, default none)",
        "--strategy-opt KEY=VALUE",
    ):
        assert text in strategy
    assert "A test's sink." in sink
    assert "--sink NAME:KEY=VALUE" in sink
    assert main(["plugins", "show", "dull"]) == 0
    assert "This sink has no options." in capsys.readouterr().out


@pytest.mark.parametrize("name", ["shine", "mtb-shine"])
def test_show_plugin(name, install, capsys):
    """A plugin is shown by the name of its entry point or distribution."""
    install(WITH_OPTIONS, entry="shine", dist="mtb-shine", version="4.5")
    assert main(["plugins", "show", name]) == 0
    out = capsys.readouterr().out
    assert "mtb-shine 4.5" in out
    assert "mtb_strategies, mtb_sinks" in out
    assert "shiny, dull" in out


def test_show_what_failed(install, capsys):
    """A failed plugin is shown with its reason; what it would have provided is refused with it."""
    body = WITH_OPTIONS + "\n@hookimpl\ndef mtb_models(): raise ValueError('boom')\n"
    install(body, entry="broken", dist="mtb-broken")
    assert main(["plugins", "show", "broken"]) == 0
    assert "reason        its hook mtb_models raised ValueError: boom" in capsys.readouterr().out
    clash = "@hookimpl\ndef mtb_sinks(): return [SinkInfo(n, 'x', 'a:b') for n in ('jsonl', 'fine')]"
    install(clash, entry="clash", dist="mtb-clash")
    assert main(["plugins", "show", "fine"]) == 2
    assert "provided by mtb-core already" in capsys.readouterr().err


def test_show_unknown(capsys):
    """An unknown name gets a suggestion, and exit code 2."""
    assert main(["plugins", "show", "jsnl"]) == 2
    assert "Did you mean 'jsonl'?" in capsys.readouterr().err


def test_strict(install, monkeypatch, capsys):
    """With MTB_STRICT_PLUGINS=1 the list is shown, and a failed plugin makes the code 2."""
    monkeypatch.setenv("MTB_STRICT_PLUGINS", "1")
    install("raise ImportError('no such symbol')", entry="broken")
    assert main(["plugins", "list"]) == 2
    captured = capsys.readouterr()
    assert "core" in captured.out
    assert "MTB_STRICT_PLUGINS" in captured.err
