"""``mtb train``: from the command line to `mtb_core.run` and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mtb_core.api.errors import EXIT_OK, EXIT_STOPPED
from mtb_core.config import load_config
from mtb_core.launch.worker import external_launcher
from mtb_core.measure.outputs import check_output
from mtb_core.registry.discovery import discover, warn_failed

from .options import GroupedCommand, GroupedOption, given_settings, setting_options
from .root import warn

if TYPE_CHECKING:
    from mtb_core.measure.result import Result


def _train(config: str | None, as_json: bool, quiet: bool, **_settings: Any) -> int:
    """Train a model and measure it.

    Settings come from the defaults, then --config, then the command line. Workers are started here, --nproc of them;
    under torchrun this process is one worker. Exit codes: 0 done, 2 wrong configuration, 3 the run failed, 4 stopped
    on request.
    """
    return _run(given_settings(click.get_current_context()), config, as_json=as_json, quiet=quiet)


def _run(given: dict[str, Any], config: str | None, *, as_json: bool, quiet: bool) -> int:
    wanted = load_config(given, file=config)
    if wanted.output is not None and config is not None:
        check_output(wanted.output, inputs=[config])
    registry = discover(disabled=wanted.no_plugin)
    warn_failed(registry, warn)
    registry.strategy(wanted.strategy)

    from mtb_core.running import reports_here, run  # noqa: PLC0415  (imports torch; the help must not)

    result = run(wanted, quiet=quiet)
    if not reports_here():
        return EXIT_OK
    _show(result, as_json)
    if result.exit_code == EXIT_STOPPED and external_launcher() is not None:
        return EXIT_OK  # torchrun takes any other code for a failure, and would restart
    return result.exit_code


def _show(result: Result, as_json: bool) -> None:
    """The result on stdout; what went wrong on stderr."""
    if as_json:
        from mtb_core.measure.jsonio import dumps  # noqa: PLC0415

        click.echo(dumps(result, indent=2))
    else:
        from .show import print_result  # noqa: PLC0415

        file = result.config.get("output") or (result.run_dir and Path(result.run_dir) / "result.json")
        print_result(result, folder=result.run_dir, file=file)
    if result.failure is not None:
        sys.stdout.flush()
        click.echo(f"mtb: error: {result.failure['text']}", err=True)


def _own_options() -> list[click.Parameter]:
    return [
        GroupedOption(["--config"], metavar="FILE", help="TOML file with settings; `mtb init` writes one."),
        GroupedOption(["--json", "as_json"], is_flag=True, help="Print the result as one JSON document on stdout."),
        GroupedOption(["--quiet"], is_flag=True, help="No progress on stderr."),
    ]


train = GroupedCommand("train", callback=_train, help=_train.__doc__, params=[*_own_options(), *setting_options()])


def train_command(name: str, strategy: str, options: Mapping[str, click.Option], *, help: str) -> click.Command:
    """A command that trains with one `strategy`, for its plugin: ``mtb train`` with fewer words.

    It takes the options of ``mtb train`` except ``--strategy``, and `options`: by the name of the strategy's option
    that they give, each with a parameter name of its own. What the command line says wins over ``--config``, where
    another strategy, with its options, may stand.
    """

    def callback(config: str | None, as_json: bool, quiet: bool, **_settings: Any) -> int:
        context = click.get_current_context()
        given = given_settings(context)
        table = dict(given.get("strategy_opt", {}))
        for key, option in options.items():
            if context.get_parameter_source(str(option.name)) is not ParameterSource.COMMANDLINE:
                continue
            if key in table:
                msg = f"{option.opts[0]} and --strategy-opt {key}={table[key]} say the same thing; give one of them."
                raise click.UsageError(msg, context)
            table[key] = context.params[str(option.name)]
        given["strategy"] = strategy
        if table:
            given["strategy_opt"] = table
        return _run(given, config, as_json=as_json, quiet=quiet)

    settings = [option for option in setting_options() if option.name != "strategy"]
    return GroupedCommand(name, callback=callback, help=help, params=[*_own_options(), *options.values(), *settings])
