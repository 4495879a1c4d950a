"""``mtb report`` and ``mtb explain``: from the command line to files and back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from mtb_core import ConfigError, check_output

_FORMATS = ("html", "md", "terminal")
_SUFFIXES = {".html": "html", ".htm": "html", ".md": "md", ".markdown": "md", ".txt": "terminal"}
_TITLE = "MiniTrainBench report"
#: How often a page that is being watched reads its own file again, in seconds.
_REFRESH_S = 5


@click.command("report")
@click.argument("paths", nargs=-1, metavar="PATH...")
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    help="By default what the name of --output says; without it, terminal.",
)
@click.option("--output", metavar="FILE", help="Write the report there instead of to stdout.")
@click.option("--title", default=_TITLE, show_default=True, metavar="TEXT", help="The heading.")
@click.option(
    "--watch",
    "watched",
    metavar="DIR",
    help="Report on this folder too, and write anew when results in it change, until Ctrl-C; needs --output.",
)
@click.option("--quiet", is_flag=True, help="Nothing on stderr.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def report(
    paths: tuple[str, ...],
    form: str | None,
    output: str | None,
    title: str,
    watched: str | None,
    quiet: bool,
    debug: bool,  # noqa: ARG001  (read where errors are shown)
) -> int:
    """Make a report of results: HTML page, Markdown or terminal.

    PATH is a result, or a folder that holds some at any depth; results of every kind go into one report, those of the
    older schema too. Exit codes: 0 done, 2 wrong usage, 130 Ctrl-C before the report was written.
    """
    places = [Path(p).expanduser() for p in [*paths, *([watched] if watched else [])]]
    target = None if output is None else Path(output).expanduser()
    chosen = form or (_SUFFIXES.get(target.suffix.lower(), "terminal") if target is not None else "terminal")
    _check(places, target, watched)
    if watched is None:
        _deliver(_rendered(places, chosen, title, target), target)
        _say(f"Report written to {output}.", quiet=quiet or target is None)
        return 0
    assert target is not None
    return _watch(places, chosen, title, target, quiet=quiet)


def _check(places: list[Path], target: Path | None, watched: str | None) -> None:
    if not places:
        raise ConfigError(
            "No results are named. Give files or folders: `mtb report runs/` or `mtb report --watch runs/`."
        )
    if watched is not None and target is None:
        raise ConfigError("--watch needs --output FILE: a report that is written again and again needs a place.")
    if watched is not None and not Path(watched).expanduser().is_dir():
        raise ConfigError(f"--watch {watched} is no folder; give the one that the results are written to.")
    if target is not None:
        check_output(target, inputs=places)


def _rendered(places: list[Path], form: str, title: str, target: Path | None, refresh_s: int | None = None) -> str:
    from mtb_report.results import Found, find_records  # noqa: PLC0415

    from .build import build  # noqa: PLC0415

    found = find_records(places)
    if not found.records and not found.unreadable and refresh_s is None:
        listed = ", ".join(map(str, places))
        raise ConfigError(f"There are no results in {listed}; give what `mtb` wrote with --output, or runs' folders.")
    made = build(Found(found.records, found.unreadable), title)
    if form == "html":
        from .html import html  # noqa: PLC0415

        return html(made, refresh_s=refresh_s)
    if form == "md":
        from .markdown import markdown  # noqa: PLC0415

        return markdown(made)
    from .terminal import terminal  # noqa: PLC0415

    return terminal(made, color=target is None and sys.stdout.isatty() and "NO_COLOR" not in os.environ)


def _deliver(text: str, target: Path | None) -> None:
    from .watch import write_text  # noqa: PLC0415

    if target is None:
        encoding = sys.stdout.encoding or "utf-8"  # a character that stdout cannot spell is no reason to fail
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
        return
    try:
        write_text(target, text)
    except OSError as error:
        raise ConfigError(
            f"The report cannot be written to {target}: {error.strerror}. Give another --output."
        ) from error


def _watch(places: list[Path], form: str, title: str, target: Path, *, quiet: bool) -> int:
    from .watch import watch  # noqa: PLC0415

    written = False

    def write() -> None:
        nonlocal written
        _deliver(_rendered(places, form, title, target, _REFRESH_S), target)
        _say(f"Report {'written again' if written else f'written to {target}; Ctrl-C ends'}.", quiet=quiet)
        written = True

    try:
        watch(places, write, without=target)
    except KeyboardInterrupt:
        if not written:
            raise
        # The last word: the page stops reading itself again.
        _deliver(_rendered(places, form, title, target), target)
        _say(f"Report in {target} is final.", quiet=quiet)
    return 0


def _say(text: str, *, quiet: bool) -> None:
    if not quiet:
        click.echo(text, err=True)


@click.command("explain")
@click.argument("path", metavar="RESULT")
@click.option("--output", metavar="FILE", help="Write the page there instead of to stdout.")
@click.option("--width", type=click.IntRange(min=40), default=88, show_default=True, metavar="N", help="Columns.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def explain(path: str, output: str | None, width: int, debug: bool) -> int:  # noqa: ARG001
    """Say in a page of prose what a result's numbers mean, what is unusual, and what to measure next.

    RESULT is a result file or a run's folder. All that is said follows by fixed rules from what the file records.
    """
    from mtb_report.results import read_record  # noqa: PLC0415

    from .explain import explained  # noqa: PLC0415
    from .prose import page  # noqa: PLC0415
    from .soundness import fault_in  # noqa: PLC0415

    target, place = None if output is None else Path(output).expanduser(), Path(path).expanduser()
    if target is not None:
        check_output(target, inputs=[place])
    record = read_record(place)
    fault = fault_in(record, explained)
    if fault is not None:
        raise ConfigError(f"{record.path} cannot be explained: {fault}. Give a result that `mtb` wrote.")
    _deliver(page(explained(record), width), target)
    return 0
