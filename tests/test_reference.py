"""The reference pages and the hooks: documented, current, and each of them exercised."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType

import attrs
import pytest

import mtb_core
from mtb_core import DiscoverySpecs, ObserverSpecs, Strategy, StrategySpecs
from mtb_core.registry.discovery import discover
from mtb_core.registry.records import KINDS

PAGES = ("hooks.md", "cli.md", "checks.md")


def names(specs: type) -> list[str]:
    return [name for name in vars(specs) if name.startswith("mtb_")]


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_current(generate: ModuleType, root: Path, page: str) -> None:
    """The committed page is what the code says; `make docs` writes it."""
    assert set(PAGES) == set(generate.pages())
    kept = (root / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert kept == generate.pages()[page], "the reference is behind the code: run `make docs` and commit the result"


@pytest.mark.parametrize("specs", [DiscoverySpecs, StrategySpecs, ObserverSpecs])
def test_every_hook_is_documented(generate: ModuleType, specs: type) -> None:
    """Each hook has a docstring of whole sentences, each argument a type, and stands in the reference."""
    page = generate.pages()["hooks.md"]
    for name in names(specs):
        hook = getattr(specs, name)
        assert (hook.__doc__ or "").strip().endswith("."), f"{name} has no docstring"
        given = inspect.signature(hook)
        assert given.return_annotation is not inspect.Signature.empty, f"{name} says not what it returns"
        for argument in list(given.parameters.values())[1:]:
            assert argument.annotation is not inspect.Parameter.empty, f"{name}: {argument.name} has no type"
        assert f"### `{name}`\n\n```python\n{generate.signature(specs, name)}\n```" in page


def test_strategy_methods_are_the_strategy_hooks() -> None:
    """`Strategy` has one public method for each strategy hook, with the same arguments."""
    methods = {n for n in vars(Strategy) if not n.startswith("_")}
    assert {f"mtb_{n}" for n in methods} == set(names(StrategySpecs))
    for name in methods:
        spec = inspect.signature(getattr(StrategySpecs, f"mtb_{name}"))
        assert list(inspect.signature(getattr(Strategy, name)).parameters) == list(spec.parameters)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Put a distribution `probe` with one plugin module on the path, as an installer would."""
    (folder / "probe_plugin.py").write_text(code)
    info = folder / "probe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mtb]\nprobe = probe_plugin\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "probe_plugin", raising=False)
    monkeypatch.delenv("MTB_DISABLE_PLUGINS", raising=False)


def test_every_discovery_hook_reaches_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that implements every discovery hook finds each of its descriptions in the registry."""
    assert {kind.hook for kind in KINDS} == set(names(DiscoverySpecs))
    code = "import mtb_core\nPLUGIN_API = mtb_core.PLUGIN_API\n"
    for kind in KINDS:
        plan = ", print" if kind.info is mtb_core.StrategyInfo else ""
        made = f"mtb_core.{kind.info.__name__}('probe', 'Help.', 'probe_plugin:x'{plan})"
        code += f"@mtb_core.hookimpl\ndef {kind.hook}():\n    return [{made}]\n"
    install(tmp_path, monkeypatch, code)
    registry = discover(strict=False)
    for kind in KINDS:
        found = getattr(registry, kind.plural)["probe"]
        assert isinstance(found, kind.info), kind.hook


PROBE = """
import mtb_core
from mtb_core import hookimpl

PLUGIN_API = mtb_core.PLUGIN_API
CALLED = []

class Probe:
{methods}

@hookimpl
def mtb_run_plugins():
    return [mtb_core.RunPluginInfo("probe", "Help.", "probe_plugin:Probe")]
"""


def probe_code() -> str:
    """A plugin whose object wraps every strategy hook and implements every observer hook, and notes the calls."""
    methods = [
        f"    @hookimpl(wrapper=True)\n    def {name}(self):\n        CALLED.append('{name}')\n        return (yield)\n"
        for name in names(StrategySpecs)
    ]
    methods += [
        f"    @hookimpl\n    def {name}(self):\n        CALLED.append('{name}')\n        return {{'probe': 1}}\n"
        for name in names(ObserverSpecs)
    ]
    return PROBE.format(methods="\n".join(methods))


def test_every_run_hook_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run that evaluates and saves, and one that resumes it, a stranger's plugin sees every run hook."""
    install(tmp_path, monkeypatch, probe_code())
    monkeypatch.chdir(tmp_path)
    config = mtb_core.TrainConfig(
        until_step=2,
        warmup_steps=0,
        batch_size=2,
        seq_length=8,
        d_model=8,
        n_heads=2,
        n_layers=1,
        vocab_size=64,
        device="cpu",
        eval_data="synthetic",
        eval_batches=1,
        checkpoint_dir="checkpoints",
        save_every=2,
        sink=(),
    )
    mtb_core.run(config, quiet=True).check()
    called = sys.modules["probe_plugin"].CALLED
    assert called.count("mtb_prepare") == called.count("mtb_close") == called.count("mtb_run_finished") == 1
    assert called.count("mtb_backward") == called.count("mtb_step_recorded") == 2
    mtb_core.run(attrs.evolve(config, until_step=3, resume="latest"), quiet=True).check()
    assert set(called) == {*names(StrategySpecs), *names(ObserverSpecs)} - {"mtb_all_sum"}  # there is one rank
