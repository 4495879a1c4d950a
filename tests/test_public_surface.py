"""What others rely on: public names, hook signatures, options. A change must be meant.

The snapshots are text, so that a change shows in review. After a change that is meant, write them anew with

    MTB_UPDATE_SNAPSHOTS=1 pytest tests/test_public_surface.py

and record it in CHANGELOG.md; a hook that changed needs a new `PLUGIN_API`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest

import mtb_core
import mtb_core.ckpt
import mtb_core.launch
from mtb_core.builtin.plugin import mtb_commands

SNAPSHOTS = Path(__file__).parent / "snapshots"


def compare(name: str, lines: list[str]) -> None:
    """Hold `lines` against the snapshot `name`, or write it."""
    path = SNAPSHOTS / name
    if os.environ.get("MTB_UPDATE_SNAPSHOTS") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    kept = path.read_text(encoding="utf-8").splitlines()
    difference = "\n".join(difflib.unified_diff(kept, lines, "snapshot", "now", lineterm="", n=0))
    assert kept == lines, f"the public surface changed; if it is meant, see {__file__}\n{difference}"


def test_public_names() -> None:
    """`mtb_core.__all__`, and what authors of checkpoint formats and launchers import, are what they were; every name exists."""
    special = [f"ckpt.{name}" for name in sorted(mtb_core.ckpt.__all__)]
    special += [f"launch.{name}" for name in sorted(mtb_core.launch.__all__)]
    compare("names.txt", [*sorted(mtb_core.__all__), *special])
    for package in (mtb_core, mtb_core.ckpt, mtb_core.launch):
        for name in package.__all__ * 2:  # twice: importing a submodule binds its name in the package
            hidden = inspect.ismodule(getattr(package, name))
            assert not hidden, f"{package.__name__}.{name} is hidden by a module of that name"


def test_what_plugins_offer_each_other() -> None:
    """Public names of the plugins that others build on, with their signatures and methods, are what they were."""
    lines = []
    for package in ("mtb_checkpoint", "mtb_ddp", "mtb_evidence", "mtb_fsdp", "mtb_launcher"):
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            lines.append(f"{package}.{name}{inspect.signature(value)}")
            lines += [
                f"  .{method}{inspect.signature(function)}"
                for method, function in sorted(vars(value).items())
                if inspect.isfunction(function) and not method.startswith("_")
            ]
    compare("plugins.txt", lines)


def test_hook_signatures(generate: ModuleType) -> None:
    """Hooks, their order, arguments and types are what they were."""
    compare(
        "hooks.txt",
        [
            f"PLUGIN_API {mtb_core.PLUGIN_API}",
            *(generate.signature(specs, n) for _, specs, _ in generate.LAYERS for n in generate.hook_names(specs)),
        ],
    )


def options_of(name: str, command: click.Command) -> Iterator[str]:
    """One line for each command, argument and option."""
    yield name
    for parameter in command.params:
        shown = "/".join([*parameter.opts, *parameter.secondary_opts])
        many = " ..." if getattr(parameter, "multiple", False) or parameter.nargs == -1 else ""
        kind = "flag" if getattr(parameter, "is_flag", False) else "value"
        required = " required" if parameter.required else ""
        yield f"  {parameter.param_type_name} {shown} {kind}{many}{required}"
    if isinstance(command, click.Group):
        for child in command.commands.values():
            yield from options_of(f"{name} {child.name}", child)


def test_command_line() -> None:
    """Commands and options of core, and which of them take a value, are what they were."""
    lines = [
        line for info in mtb_commands() for line in options_of(f"mtb {info.name}", mtb_core.load_reference(info.impl))
    ]
    compare("cli.txt", lines)


def test_a_changed_surface_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The comparison itself notices an addition and a removal, and says where to look."""
    monkeypatch.delenv("MTB_UPDATE_SNAPSHOTS", raising=False)
    monkeypatch.setitem(globals(), "SNAPSHOTS", tmp_path)
    (tmp_path / "x.txt").write_text("a\nb\n")
    compare("x.txt", ["a", "b"])
    for lines in (["a"], ["a", "b", "c"]):
        with pytest.raises(AssertionError, match="public surface changed"):
            compare("x.txt", lines)
