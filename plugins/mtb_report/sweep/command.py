"""``mtb sweep``: from a TOML file to a folder of results."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtb_core import ConfigError, RunFailed, check_output
from mtb_report.output import write_output

if TYPE_CHECKING:
    from .plan import SweepPlan
    from .runner import Progress

#: Outcomes that a sweep may find: running out of memory is an answer, not a mistake.
_ANSWERS = ("success", "oom", "not_run")


def _list_recipes(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    from .recipes import FOLDER, abouts  # noqa: PLC0415

    known = abouts()
    width = max(map(len, known))
    for name, about in known.items():
        click.echo(f"{name:{width}}  {about}")
    click.echo(f"\nmtb sweep NAME runs one; to change one, copy its file from {FOLDER}")
    context.exit()


@click.command()
@click.argument("file", metavar="FILE.toml|RECIPE")
@click.option(
    "--list-recipes",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_recipes,
    help="Name the sweeps that come with mtb, and end.",
)
@click.option("--size", metavar="NAME", help="Which of the file's sizes. [default: its first]")
@click.option(
    "--run-dir",
    metavar="DIR",
    help="The folder of all results; an interrupted sweep goes on there. [default: runs/sweep-NAME-SIZE]",
)
@click.option("--dry-run", is_flag=True, help="Show the cells and their settings, and run nothing.")
@click.option("--retry", is_flag=True, help="Run cells again that did not succeed.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Stop a cell after X seconds, in place of the file's.",
)
@click.option(
    "--formal",
    is_flag=True,
    help="Refuse a changed tree, a busy machine, another build; replace DIR only if every trial succeeds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("--output", metavar="FILE", help="Write the same document to FILE.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def sweep(file: str, size: str | None, dry_run: bool, **given: Any) -> int:
    """Run a matrix of trainings, each in a process of its own, in random order.

    The matrix is that of a file, or of a recipe that comes with mtb. A cell that fails or runs out of memory is recorded, and the rest go on. The same command goes on after an
    interruption. Exit code 0 where every cell succeeded or ran out of memory, 3 where one failed otherwise.
    """
    import attrs  # noqa: PLC0415  (help needs none of it)

    from .plan import read_plan  # noqa: PLC0415
    from .recipes import sweep_file  # noqa: PLC0415
    from .shape import check_seconds  # noqa: PLC0415

    source = sweep_file(file)
    if given["output"] is not None:
        check_output(given["output"], inputs=[source])
    plan = read_plan(source, size)
    if given["timeout_s"] is not None:
        check_seconds("--timeout-s", given["timeout_s"])
        plan = attrs.evolve(plan, timeout_s=given["timeout_s"])
    if dry_run:
        return _show_plan(plan, as_json=given["as_json"])
    folder = Path(given["run_dir"] or f"runs/sweep-{plan.name}{f'-{plan.size}' if plan.size else ''}")
    return _run(plan, folder, given)


def _run(plan: SweepPlan, folder: Path, given: dict[str, Any]) -> int:
    from mtb_core import dumps  # noqa: PLC0415
    from mtb_report.training import ending_on_request  # noqa: PLC0415

    from .formal import check_formal, publish, staging_folder  # noqa: PLC0415
    from .runner import run_sweep  # noqa: PLC0415
    from .show import show  # noqa: PLC0415

    formal = given["formal"]
    if formal:
        check_formal(plan, folder, sys.argv)
    place = staging_folder(folder) if formal else folder
    with _locked(place), ending_on_request():
        document = run_sweep(
            plan,
            place,
            argv=sys.argv,
            retry=given["retry"],
            formal=formal,
            on_progress=_silent if given["quiet"] else _tell,
        )
    if given["as_json"]:
        click.echo(dumps(document, indent=2))
    else:
        show(document, place)
    if given["output"] is not None:
        write_output(given["output"], document)
    if formal:
        publish(plan, document, place, folder, sys.argv)
    failed = {name: n for name, n in document["counts"].items() if name not in _ANSWERS}
    if failed:
        listed = ", ".join(f"{n} {name}" for name, n in failed.items())
        raise RunFailed(
            f"Of {len(document['cells'])} cells: {listed}. What each of them printed is in {place}/cells; --retry runs "
            "them again."
        )
    return 0


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second sweep out of `folder` while one runs there; a lock of a process that died does not hold."""
    import fcntl  # noqa: PLC0415  (not on every system, and needed here only)

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {folder} cannot be made: {error.strerror}.") from error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"Another sweep runs in {folder}; wait for it, or name another folder.") from error
    try:
        yield
    finally:
        os.close(descriptor)


def _tell(progress: Progress) -> None:
    labels = " ".join(f"{name}={value}" for name, value in progress.cell.labels.items())
    row = progress.row
    if row is None:
        text = f"[{progress.number}/{progress.of}] {labels}"
    else:
        taken = "" if row["seconds"] is None else f" after {row['seconds']:.1f} s"
        text = f"      {row['status'] or 'not run'}{taken}" + (f": {row['reason']}" if row["reason"] else "")
    if progress.left_s is not None and row is not None and progress.left_s:
        text += f"; about {_duration(progress.left_s)} left"
    click.echo(text, err=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _silent(_progress: Progress) -> None:
    """Progress that nobody wants to see."""


def _show_plan(plan: SweepPlan, *, as_json: bool) -> int:
    import attrs  # noqa: PLC0415

    from mtb_core import dumps  # noqa: PLC0415

    if as_json:
        click.echo(dumps({**attrs.asdict(plan), "order": [cell.id for cell in plan.in_order()]}, indent=2))
        return 0
    from .show import show_plan  # noqa: PLC0415

    show_plan(plan)
    return 0
