"""``mtb plugins``: what is installed, what it provides, and why some of it cannot be used."""

from __future__ import annotations

from typing import Any

import attrs
import click

from mtb_core.api import NoOptions, PluginError, describe_options, nearest
from mtb_core.registry.discovery import Registry, discover, strict_plugins, warn_failed
from mtb_core.registry.records import KINDS, Kind, PluginRecord

from .root import OpenGroup, warn


@click.group(cls=OpenGroup)
def plugins() -> None:
    """Show installed plugins and what they provide."""


@plugins.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def list_plugins(as_json: bool) -> None:
    """List installed plugins, those that are disabled or failed too.

    With MTB_STRICT_PLUGINS=1 a failed plugin makes the exit code 2.
    """
    registry = discover(strict=False)
    if as_json:
        import json  # noqa: PLC0415

        document = {"schema_version": 1, "plugins": [record.as_json() for record in registry.records]}
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        click.echo(_table([_row(record) for record in registry.records]))
        for record in registry.records:
            if record.status == "failed":
                click.echo(f"\n{record.label} could not be loaded: {record.reason}.")
    if strict_plugins():
        discover(strict=True)


@plugins.command()
@click.argument("name")
def show(name: str) -> None:
    """Show NAME: a plugin, or a strategy, command, sink, model… with its options."""
    registry = discover(strict=False)
    warn_failed(registry, warn)
    parts = [_plugin_text(r) for r in registry.records if name in {r.name, r.distribution}]
    parts += [_info_text(registry, kind, name) for kind in KINDS if name in getattr(registry, kind.plural)]
    if not parts:
        raise PluginError(_unknown(registry, name))
    click.echo("\n\n".join(parts))


def _unknown(registry: Registry, name: str) -> str:
    for kind in KINDS:
        if any(name in r.provides.get(kind.plural, ()) for r in registry.records):
            return registry.why_not(kind, name)
    names = {r.name: None for r in registry.records}
    for kind in KINDS:
        names.update(dict.fromkeys(getattr(registry, kind.plural)))
    return f"No installed plugin is called or provides '{name}'.{nearest(name, names)} Valid: {', '.join(names)}."


def _row(record: PluginRecord) -> tuple[str, ...]:
    shown = [kind for kind in KINDS if kind.plural != "doctor_checks" and record.provides.get(kind.plural)]
    provided = "; ".join(
        f"{kind.plural.replace('_', ' ')}: {', '.join(record.provides[kind.plural])}" for kind in shown
    )
    api = "-" if record.api is None else str(record.api)
    provides = provided if record.status == "active" else record.reason if record.status == "disabled" else "see below"
    return (record.name, record.distribution, record.version, api, record.status, provides or "-")


def _table(rows: list[tuple[str, ...]]) -> str:
    rows = [("NAME", "DISTRIBUTION", "VERSION", "API", "STATUS", "PROVIDES"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)


def _plugin_text(record: PluginRecord) -> str:
    lines = [
        f"plugin {record.name}",
        f"  distribution  {record.distribution} {record.version}",
        f"  api           {'unknown' if record.api is None else record.api}",
        f"  status        {record.status}",
    ]
    if record.reason:
        lines.append(f"  reason        {record.reason}")
    if record.hooks:
        lines.append(f"  hooks         {', '.join(record.hooks)}")
    lines += [
        f"  {plural.replace('_', ' '):<13} {', '.join(names)}" for plural, names in record.provides.items() if names
    ]
    return "\n".join(lines)


def _info_text(registry: Registry, kind: Kind, name: str) -> str:
    info = getattr(registry, kind.plural)[name]
    provider = registry.provider(kind.plural, name)
    assert provider is not None
    lines = [f"{kind.singular} {name}: {info.help}", f"  provided by  {provider.label}", f"  code         {info.impl}"]
    if getattr(info, "legacy", False):
        lines.append("  legacy       kept for comparison and migration")
    options = getattr(info, "options", None)
    if options is not None:
        lines += ["", *_options_text(kind, options)]
    return "\n".join(lines)


def _options_text(kind: Kind, options: type) -> list[str]:
    if options is NoOptions or not attrs.fields(options):
        return [f"  This {kind.singular} has no options."]
    lines = [f"  Options ({kind.options}):"]
    for found in describe_options(options):
        valid = f"; one of {', '.join(map(_plain, found.choices))}" if found.choices else ""
        lines.append(f"    {found.name} ({found.type}, default {_plain(found.default)}{valid})")
        lines.append(f"        {found.help}")
    return lines


def _plain(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
