# ruff: noqa: INP001  (a script beside the pages, not a package)
"""Writes docs/reference from the code, so that the reference cannot differ from what runs: ``make docs``.

``hooks.md`` comes from the hook specifications and the values they pass, ``cli.md`` from the commands' own options,
``checks.md`` from the checks of the conformance kit.
A test compares the committed pages with what this makes.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import click

import mtb_core
from mtb_core import DiscoverySpecs, ObserverSpecs, OptionHelp, Strategy, StrategySpecs, describe_options
from mtb_core.api import hooks
from mtb_kit.checking import all_checks

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Written by `make docs` from the code; edit that instead. -->\n\n"
_ABOUT_SETTINGS = """\
Every setting of `mtb train` is also a key of a TOML file for `--config` and of `mtb_core.TrainConfig`, with `_` for
`-`. Options on the command line win over the file."""
#: Packages of this repository beside core, in the order in which they are shown.
PLUGINS = (
    "mtb_ddp",
    "mtb_fsdp",
    "mtb_deepspeed",
    "mtb_tp",
    "mtb_pp",
    "mtb_ep",
    "mtb_comm",
    "mtb_checkpoint",
    "mtb_data",
    "mtb_dcp",
    "mtb_doctor",
    "mtb_evidence",
    "mtb_guards",
    "mtb_kit",
    "mtb_launcher",
    "mtb_profile",
    "mtb_report",
    "mtb_sinks",
)
_RANKS = {
    "all": "At every number of ranks.",
    "several": "At every number of ranks above one.",
    "fewest": "At the smallest number of ranks above one.",
    "most": "At the largest number of ranks.",
}
LAYERS = (
    ("Discovery", DiscoverySpecs, "Implemented by functions of a plugin module, marked with `@hookimpl`."),
    ("Run: the strategy", StrategySpecs, "Implemented by the methods of a `Strategy`; run plugins may wrap them."),
    ("Run: observers", ObserverSpecs, "Implemented by marked methods of sinks and run plugins."),
)


def main() -> int:
    """Write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


def pages() -> dict[str, str]:
    """Every page of the reference by file name."""
    return {"hooks.md": NOTE + hook_page(), "cli.md": NOTE + cli_page(), "checks.md": NOTE + check_page()}


def hook_names(specs: type) -> list[str]:
    """The hooks that `specs` declares, in order."""
    return [name for name in vars(specs) if name.startswith("mtb_")]


def hook_page() -> str:
    """All hooks with signature and docstring, then the values that they pass."""
    parts = [f"# Hooks\n\nPlugin API version {mtb_core.PLUGIN_API}.\n", markdown(hooks.__doc__)]
    for title, specs, how in LAYERS:
        parts.append(f"## {title}\n\n{markdown(specs.__doc__)}\n\n{how}")
        parts += [_hook(specs, name) for name in hook_names(specs)]
    parts.append("## Values\n\nWhat hooks take and return; all are frozen and come from `mtb_core`.")
    parts += [_value(cls) for cls in sorted(_values(), key=lambda c: c.__name__)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def signature(specs: type, name: str) -> str:
    """``mtb_prepare(job: Job) -> Prepared``."""
    given = inspect.signature(getattr(specs, name))
    arguments = [f"{p.name}: {p.annotation}" for p in list(given.parameters.values())[1:]]
    return f"{name}({', '.join(arguments)}) -> {given.return_annotation}"


def _hook(specs: type, name: str) -> str:
    text = f"### `{name}`\n\n```python\n{signature(specs, name)}\n```\n\n{markdown(getattr(specs, name).__doc__)}"
    if specs is StrategySpecs:
        method = name.removeprefix("mtb_")
        default = getattr(Strategy, method)
        body = inspect.getsource(default).rpartition('"""')[2].strip()
        what = "must be defined" if "NotImplementedError" in body else "has a default"
        text += f"\n\nMethod `{method}` of `Strategy`; it {what}: {markdown(default.__doc__)}"
    return text


def _values() -> set[type]:
    """The classes of `mtb_core` that the hooks' signatures mention, and those that their fields mention in turn."""
    found: set[type] = set()
    waiting = [signature(specs, name) for _, specs, _ in LAYERS for name in hook_names(specs)]
    while waiting:
        for word in re.findall(r"\w+", waiting.pop()):
            cls = getattr(mtb_core, word, None)
            # The fields of TrainConfig are the options of `mtb train`.
            if inspect.isclass(cls) and attrs.has(cls) and word in set(mtb_core.__all__) - {"TrainConfig"}:
                if cls not in found:
                    waiting += [str(field.type) for field in attrs.fields(cls)]
                found.add(cls)
    return found


def _value(cls: type) -> str:
    text, about = _split_attributes(cls.__doc__)
    fields = [
        f"- `{f.name}: {_type(f.type)}`{_default(f.default)}" + (f": {about[f.name]}" if f.name in about else "")
        for f in attrs.fields(cls)
    ]
    methods = [
        f"- `{name}{_arguments(member)}`: {markdown(inspect.getdoc(member)).splitlines()[0]}"
        for name, member in vars(cls).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    ]
    return "\n\n".join(filter(None, [f"### `{cls.__name__}`", text, "\n".join(fields), "\n".join(methods)]))


def _arguments(member: Any) -> str:
    return f"({', '.join(list(inspect.signature(member).parameters)[1:])})" if inspect.isfunction(member) else ""


def _split_attributes(docstring: str | None) -> tuple[str, dict[str, str]]:
    """The text of a class's docstring, and what its section "Attributes" says of each field."""
    text, _, section = inspect.cleandoc(docstring or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return markdown(text), {name: markdown(" ".join(about.split())) for name, about in entries}


def _type(given: Any) -> str:
    return given if isinstance(given, str) else getattr(given, "__name__", str(given))


def _default(value: Any) -> str:
    if value is attrs.NOTHING:
        return ""
    return " = `{}`" if isinstance(value, attrs.Factory) else f" = `{_code(value)}`"  # type: ignore[arg-type]


def _code(value: Any) -> str:
    return value.__name__ if inspect.isclass(value) else repr(value)


def cli_page() -> str:
    """All commands with their options, and the options of strategies, sinks and run plugins, of this repository's packages."""
    parts = ["# Command line", _ABOUT_SETTINGS]
    for info in _provided("mtb_commands"):
        parts += _command(f"mtb {info.name}", mtb_core.load_reference(info.impl), info.help)
    for title, hook in (("Strategies", "mtb_strategies"), ("Sinks", "mtb_sinks"), ("Run plugins", "mtb_run_plugins")):
        parts.append(f"## {title}")
        for info in _provided(hook):
            legacy = " Legacy." if getattr(info, "legacy", False) else ""
            parts.append(f"### `{info.name}`\n\n{info.help}.{legacy}")
            if options := describe_options(info.options):
                parts.append(_options_table(options))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _provided(hook: str) -> list[Any]:
    """What the packages of this repository provide, core first, whatever else is installed."""
    modules = ["mtb_core.builtin.plugin", *(f"{name}.plugin" for name in PLUGINS)]
    hooks_found = (getattr(importlib.import_module(module), hook, None) for module in modules)
    return [info for function in hooks_found if function is not None for info in function()]


def check_page() -> str:
    """Every check of the conformance kit."""
    parts = [
        "# Checks of the conformance kit",
        (
            "What `mtb plugins check NAME` and `mtb_kit.StrategyConformance` look at; how to use them is in "
            "[../conformance.md](../conformance.md)."
        ),
    ]
    group = ""
    for check in all_checks():
        if check.name.partition(".")[0] != group:
            group = check.name.partition(".")[0]
            parts.append(f"## {group}\n\n{markdown(importlib.import_module(check.function.__module__).__doc__)}")
        how = f"How: {markdown(check.how)}" if check.how else ""
        needs = f" Skipped where the strategy does not declare: {', '.join(check.needs)}." if check.needs else ""
        parts.append(
            f"### {check.name}\n\n{check.title} {_RANKS[check.ranks]}{needs}\n\n"
            f"Likely mistake: {check.mistake}.\n\n{how}"
        )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _command(name: str, command: click.Command, help_text: str) -> list[str]:
    parts = [f"## `{name}`\n\n{inspect.cleandoc(command.help or help_text)}"]
    groups: dict[str, list[click.Parameter]] = {}
    for parameter in command.params:
        groups.setdefault(getattr(parameter, "group", "Command"), []).append(parameter)
    for group, parameters in groups.items():
        table = _table(("option", "meaning"), (_parameter(p) for p in parameters))
        parts.append(f"**{group}**\n\n{table}" if len(groups) > 1 else table)
    if isinstance(command, click.Group):
        for child in command.commands.values():
            parts += [text.replace("## `", "### `", 1) for text in _command(f"{name} {child.name}", child, "")]
    return parts


def _parameter(parameter: click.Parameter) -> tuple[str, str]:
    if isinstance(parameter, click.Argument):
        name = parameter.make_metavar(click.Context(click.Command("mtb")))
        return f"`{name}`", "" if parameter.required else "may be left out"
    assert isinstance(parameter, click.Option)
    names = ", ".join(parameter.opts) + "".join(f" / {name}" for name in parameter.secondary_opts)
    metavar = "" if parameter.is_flag else " " + parameter.make_metavar(click.Context(click.Command("mtb")))
    again = " May be repeated." if parameter.multiple else ""
    return f"`{names}{metavar}`", (parameter.help or "") + again


def _options_table(options: Iterable[OptionHelp]) -> str:
    rows = []
    for option in options:
        valid = f" One of: {', '.join(map(str, option.choices))}." if option.choices else ""
        rows.append((f"`{option.name}`", option.type, f"`{option.default!r}`", option.help + valid))
    return _table(("option", "type", "default", "meaning"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def markdown(docstring: str | None) -> str:
    """A docstring as Markdown: double backticks become single ones."""
    return inspect.cleandoc(docstring or "").replace("``", "`").strip()


if __name__ == "__main__":
    sys.exit(main())
