"""``mtb profile run``: the training of ``mtb train`` under torch.profiler, with the analysis of its traces."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from mtb_core import (
    GroupedCommand,
    GroupedOption,
    TrainConfig,
    dumps,
    external_launcher,
    given_settings,
    load_config,
    setting_options,
    write_json,
)

from .schedule import Schedule
from .setting import NOT_VALID, setting_of

if TYPE_CHECKING:
    from mtb_core import Result

    from .analyze_command import Found

_SHOWN_OPERATORS = 10


def _run(
    config: str | None,
    as_json: bool,
    quiet: bool,
    profile_wait: int,
    profile_warmup: int,
    profile_active: int,
    memory_timeline: bool,
    show_collectives: bool,
    mfu: bool,
    **_settings: Any,
) -> int:
    """Train under torch.profiler and analyse the traces.

    Takes the options of `mtb train`. After its --warmup-steps, --profile-wait steps pass, --profile-warmup steps warm the
    profiler up, and --profile-active steps are recorded, one trace for each rank in RUN/trace/, to be opened in Perfetto
    (ui.perfetto.dev). The result says `benchmark: profile` and is never a valid measurement of speed.
    """
    plan = Schedule(profile_wait, profile_warmup, profile_active, memory_timeline)
    given = given_settings(click.get_current_context())
    wanted = load_config(given, file=config)
    from mtb_core import reports_here  # noqa: PLC0415  (imports torch, as `run` does: help and `analyze` must not)

    result, folder = profile_run(wanted, plan, quiet=quiet)
    if not reports_here():
        return 0
    found = _analysis(folder, result, mfu=mfu, timeline=show_collectives) if result.exit_reason == "done" else None
    shown = _document(result, found, folder)
    if folder is not None:
        write_json(folder / "result.json", shown)
    if wanted.output is not None:
        write_json(wanted.output, shown)
    if as_json:
        click.echo(dumps(shown, indent=2))
    elif found is not None and folder is not None:
        _show(result, found, folder)
    else:
        click.echo(f"The profiled run ended early: {result.exit_reason}; there is nothing to analyse.")
    if result.failure is not None:
        sys.stdout.flush()
        click.echo(f"mtb: error: {result.failure['text']}", err=True)
    if result.exit_reason == "stopped" and external_launcher() is not None:
        return 0  # torchrun takes any other code for a failure, and would restart
    return result.exit_code


def profile_run(config: TrainConfig, plan: Schedule, *, quiet: bool = False) -> tuple[Result, Path | None]:
    """Train as `config` says, recorded as `plan` says. Every external rank calls it.

    Returns:
        The result, which is no valid measurement, and the run's folder, if one was made.

    Raises:
        ConfigError: nothing was started.
    """
    config = plan.fit(config)
    from mtb_core import run  # noqa: PLC0415  (imports torch; the help and refusals must not)

    from .recorder import Recorder  # noqa: PLC0415

    # Kineto announces itself on stderr of every rank otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    result = run(config, quiet=quiet, plugins={"profile": partial(Recorder, plan)})
    reasons = [NOT_VALID, *result.performance_invalid_reasons]
    result = attrs.evolve(
        result,
        benchmark="profile",
        performance_valid=False,
        performance_invalid_reasons=reasons,
    )
    folder = config.run_dir or result.run_dir
    return result, None if folder is None else Path(folder).expanduser()


def _analysis(folder: Path | None, result: Result, *, mfu: bool, timeline: bool) -> Found | None:
    from .analyze_command import Wanted, find, find_traces, work_of  # noqa: PLC0415

    if folder is None:
        return None
    svg = folder / "trace" / "collectives.svg" if timeline else None
    told = result.to_json()
    wanted = Wanted(mfu=mfu, work=work_of(told), timeline=timeline, svg=svg, setting=setting_of(told))
    return find(find_traces([folder]), wanted)


def _document(result: Result, found: Found | None, folder: Path | None) -> dict[str, Any]:
    """The run's result, with the analysis as ``profile``."""
    document = result.to_json()
    if found is not None and folder is not None:
        document["profile"] = {**found.document(), "operators": _operators(folder)[1]}
    return document


def _operators(folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """The top operators of the lowest rank whose file is here."""
    files = sorted((folder / "trace" / "operators").glob("rank_*.json"))
    if not files:
        return 0, []
    rows = json.loads(files[0].read_text(encoding="utf-8"))
    return int(files[0].stem.partition("_")[2]), rows[:_SHOWN_OPERATORS]


def _show(result: Result, found: Found, folder: Path) -> None:
    from rich.text import Text  # noqa: PLC0415

    from .tables import operator_table, show  # noqa: PLC0415

    ranks = f"{result.world_size} rank{'' if result.world_size == 1 else 's'}"
    show([Text(f"Profile of {result.strategy} on {ranks}, {result.device}; {NOT_VALID}.", style="bold")])
    found.show()
    rank, rows = _operators(folder)
    show([operator_table(rows, rank), Text(f"Traces for ui.perfetto.dev: {folder / 'trace'}")])


def _own_options() -> list[click.Parameter]:
    def steps(name: str, default: int, text: str) -> GroupedOption:
        return GroupedOption([name], type=int, default=default, show_default=True, metavar="N", help=text)

    return [
        GroupedOption(["--config"], metavar="FILE", help="TOML file with settings; `mtb init` writes one."),
        GroupedOption(["--json", "as_json"], is_flag=True, help="Print the result as one JSON document on stdout."),
        GroupedOption(["--quiet"], is_flag=True, help="No progress on stderr."),
        steps("--profile-wait", 1, "Steps that pass before the profiler starts."),
        steps("--profile-warmup", 1, "Steps that the profiler sees but forgets: it is slow at first."),
        steps("--profile-active", 10, "Steps that are recorded; of few, a verdict is rarely sure."),
        GroupedOption(["--memory-timeline"], is_flag=True, help="Record allocations too: RUN/trace/memory/."),
        GroupedOption(
            ["--show-collectives"],
            is_flag=True,
            help="Draw one step's collectives per rank, here and as SVG in RUN/trace/.",
        ),
        GroupedOption(["--mfu"], is_flag=True, help="Split the step from the ideal to the measured into seven losses."),
    ]


run_command = GroupedCommand("run", callback=_run, help=_run.__doc__, params=[*_own_options(), *setting_options()])
