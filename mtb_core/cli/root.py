"""The group ``mtb``. Commands are found by their descriptions and imported only when they are invoked."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click

from mtb_core import __version__
from mtb_core.api import CommandInfo, PluginError, load_reference
from mtb_core.builtin.plugin import mtb_commands
from mtb_core.registry.discovery import Registry, discover, warn_failed

_TRY = (
    ("mtb train", "train a small GPT on made-up tokens, in one process"),
    ("mtb train --data DIR", "the same on the text files of a folder"),
    ("mtb init", "write mtb.toml, a configuration to start from"),
    ("mtb plugins list", "what is installed"),
    ("mtb doctor", "whether this machine is ready"),
    ("mtb --help, mtb train --help", "all commands, all options of training"),
)


#: Commands of our own distributions that somebody may look for without having them.
_ELSEWHERE = {
    "checkpoint": "mtb-checkpoint",
    "data": "mtb-data",
    "doctor": "mtb-doctor",
    "plugins check": "mtb-kit",
}


class _Group(click.Group):
    """A group whose commands plugins add to; one that is unknown or broken is a mistake in the command line."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names."""
        try:
            return super().resolve_command(ctx, args)
        except PluginError as error:
            raise click.UsageError(str(error), ctx) from error


class Root(_Group):
    """Core's own commands first: they work, and load no plugin, whatever is installed beside them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names of all commands."""
        return [name for name in _registry().commands if " " not in name]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command `cmd_name`, imported now."""
        own = {info.name: info for info in mtb_commands()}
        return _load(own[cmd_name]) if cmd_name in own else _of_plugin(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings, without importing one."""
        groups: dict[str, list[tuple[str, str]]] = {}
        commands = _registry().commands
        for info in [commands[name] for name in self.list_commands(ctx)]:
            groups.setdefault(info.group, []).append((info.name, info.help))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class OpenGroup(_Group):
    """A group of commands to which plugins add: what they name ``"plugins check"`` is in group `plugins` as `check`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The group's own commands, then those of plugins."""
        return [*super().list_commands(ctx), *self._added()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command `cmd_name`; one of a plugin is imported now."""
        full = f"{self.name} {cmd_name}"
        if cmd_name in self._added() or full in _ELSEWHERE:
            return _of_plugin(full)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, without importing one of a plugin."""
        rows = [(name, self.commands[name].get_short_help_str()) for name in super().list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([*rows, *((name, info.help) for name, info in self._added().items())])

    def _added(self) -> dict[str, CommandInfo]:
        prefix = f"{self.name} "
        return {n.removeprefix(prefix): info for n, info in _registry().commands.items() if n.startswith(prefix)}


def _of_plugin(name: str) -> click.Command:
    """A plugin's command, imported now.

    Raises:
        PluginError: there is none, with what to install or switch on where it is one of ours.
    """
    ours = _ELSEWHERE.get(name)  # these work whatever else is broken, as core's own do
    registry = _registry(strict=None if ours is None else False)
    if ours is None or name in registry.commands:
        return _load(registry.command(name))
    for record in registry.records:
        if record.distribution == ours:
            verb = "is disabled" if record.status == "disabled" else "could not be loaded"
            raise PluginError(f"There is no command '{name}' now: {record.label} {verb}: {record.reason}.")
    raise PluginError(f"The command '{name}' is not installed: pip install {ours}.")


def _registry(*, strict: bool | None = False) -> Registry:
    registry = discover(strict=strict)
    warn_failed(registry, warn)
    return registry


def warn(text: str) -> None:
    """One warning for people; of several ranks, the first one says it."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        click.echo(f"mtb: warning: {text}", err=True)


def _load(info: CommandInfo) -> click.Command:
    try:
        command = load_reference(info.impl)
    except Exception as error:
        msg = f"The command '{info.name}' cannot be used: importing {info.impl} raised {type(error).__name__}: {error}."
        raise PluginError(msg) from error
    if not isinstance(command, click.Command):
        msg = f"The command '{info.name}' cannot be used: {info.impl} is no click command."
        raise PluginError(msg)
    return command


def _version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib import metadata  # noqa: PLC0415

        try:
            torch = metadata.version("torch")
        except metadata.PackageNotFoundError:
            torch = "not installed"
        click.echo(f"mtb {__version__} (torch {torch})")
        ctx.exit()


@click.group(
    cls=Root,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show versions.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks of errors.")
@click.pass_context
def root(ctx: click.Context) -> None:
    """Train with any parallel strategy, measure it, and believe the numbers."""
    if ctx.invoked_subcommand is None:
        click.echo(f"MiniTrainBench {__version__}: train with any parallel strategy, and believe the numbers.\n\nTry:")
        for command, text in _suggestions():
            click.echo(f"  {command:<37} {text}")


def _suggestions() -> Iterator[tuple[str, str]]:
    """Commands to try: `_TRY`, and after its second line the first strategy that a plugin provides, on two ranks."""
    yield from _TRY[:2]
    active = (record for record in _registry().records[1:] if record.status == "active")
    for name in [name for record in active for name in record.provides.get("strategies", ())][:1]:
        yield f"mtb train --strategy {name} --nproc 2", "on two ranks"
    yield from _TRY[2:]
