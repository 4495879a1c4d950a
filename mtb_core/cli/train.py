"""``mtb train``: from the command line to `mtb_core.run` and back."""

from __future__ import annotations

from typing import Any

import click

from mtb_core.config import load_config
from mtb_core.registry.discovery import discover, warn_failed

from .options import GroupedCommand, GroupedOption, given_settings, setting_options
from .root import warn


def _train(config: str | None, as_json: bool, quiet: bool, **_settings: Any) -> int:
    """Train a model and measure it.

    Settings come from the defaults, then --config, then the command line. Workers are started here, --nproc of them;
    under torchrun this process is one worker. Exit codes: 0 done, 2 wrong configuration, 3 the run failed, 4 stopped
    on request.
    """
    context = click.get_current_context()
    wanted = load_config(given_settings(context), file=config)
    registry = discover(disabled=wanted.no_plugin)
    warn_failed(registry, warn)
    registry.strategy(wanted.strategy)

    from mtb_core.run import run  # noqa: PLC0415  (imports torch; the help must not)

    result = run(wanted, quiet=quiet)
    if as_json:
        from mtb_core.measure.jsonio import dumps  # noqa: PLC0415

        click.echo(dumps(result.document, indent=2))
    else:
        from .show import print_result  # noqa: PLC0415

        print_result(result)
    return result.exit_code


train = GroupedCommand(
    "train",
    callback=_train,
    help=_train.__doc__,
    params=[
        GroupedOption(["--config"], metavar="FILE", help="TOML file with settings; `mtb init` writes one."),
        GroupedOption(["--json", "as_json"], is_flag=True, help="Print the result as one JSON document on stdout."),
        GroupedOption(["--quiet"], is_flag=True, help="No progress, errors only."),
        *setting_options(),
    ],
)
