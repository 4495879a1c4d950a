"""Command-line options made from the configuration's settings, so that each is declared once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from mtb_core.config.schema import GROUPS, Setting, TrainConfig, option_name, settings, value_type
from mtb_core.registry.discovery import discover

OWN_GROUP = "Command"
#: Settings whose value is the name of something that plugins provide, with the kind of it.
_KINDS = {
    "strategy": "strategies",
    "launcher": "launchers",
    "sink": "sinks",
    "model": "models",
    "data": "datasets",
    "optimizer": "optimizers",
    "lr_scheduler": "schedules",
}


def _number(kind: type) -> Callable[[str], Any]:
    """A number where the text can be read as one; else the text, which `TrainConfig` refuses in its own words."""

    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text

    return convert


class GroupedOption(click.Option):
    """An option that is shown under a heading."""

    def __init__(self, *args: Any, group: str = OWN_GROUP, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Complete the value: names that plugins provide, the choices, or files where the value is a path."""
        words = re.split(r"\W+", self.metavar or "")
        names = [word for word in words if word.islower()]
        if self.name in _KINDS:
            names = list(getattr(discover(), _KINDS[self.name]))
        found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        if {"DIR", "FILE", "PATH"} & set(words):
            found.append(CompletionItem(incomplete, type="file"))
        return found


class GroupedCommand(click.Command):
    """A command whose help shows options by heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, heading by heading."""
        rows: dict[str, list[tuple[str, str]]] = {OWN_GROUP: [], **{group: [] for group in GROUPS}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                rows[getattr(parameter, "group", OWN_GROUP)].append(record)
        for heading, shown in rows.items():
            if shown:
                with formatter.section(heading):
                    formatter.write_dl(shown)


def setting_options() -> list[click.Option]:
    """One option for each setting of `TrainConfig`, with the same name."""
    return [_option(name, meta) for name, meta in settings().items()]


def given_settings(ctx: click.Context) -> dict[str, Any]:
    """Those settings that stand on the command line, for `load_config`.

    Raises:
        click.UsageError: a table's entry without ``=``.
    """
    given: dict[str, Any] = {}
    for name in settings():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            value = ctx.params[name]
            given[name] = key_values(value, option_name(name)) if value_type(name) is dict else value
    return given


def key_values(entries: Iterable[str], label: str) -> dict[str, str]:
    """The table that a repeatable option `label` with values ``KEY=VALUE`` makes.

    Raises:
        click.UsageError: an entry without ``=``.
    """
    table = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            msg = f"{label} is {entry!r}; it must be KEY=VALUE, one option each time."
            raise click.UsageError(msg, click.get_current_context(silent=True))
        table[key] = value
    return table


def _option(name: str, meta: Setting) -> GroupedOption:
    kind, label = value_type(name), option_name(name)
    help_text = meta.help + _default(name, meta, kind)
    common: dict[str, Any] = {"default": None, "help": help_text, "group": meta.group}
    if kind is bool:
        off = meta.off_name or "no_" + name
        return GroupedOption([f"{label}/{option_name(off)}", name], **common)
    if meta.repeatable:
        return GroupedOption([label, name], multiple=True, metavar=meta.metavar, **common)
    metavar = "|".join(meta.choices) or meta.metavar or {int: "N", float: "X"}.get(kind)
    numeric = _number(kind) if kind in {int, float} else None
    return GroupedOption([label, name], type=numeric, metavar=metavar, **common)


def _default(name: str, meta: Setting, kind: type) -> str:
    default = attrs.fields_dict(TrainConfig)[name].default
    if default is None or kind is bool or meta.repeatable:
        return ""
    return f" [default: {default:g}]" if kind is float else f" [default: {default}]"
