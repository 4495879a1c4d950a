"""``mtb compare``: from two results or configurations to a verdict."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtb_core import CheckFailed, ConfigError, check_output
from mtb_report.output import write_output

from .metrics import METRICS

if TYPE_CHECKING:
    from mtb_report.results import Record

#: What --run writes into its folder.
DOCUMENT = "comparison.json"
#: Above it an interval says next to nothing, and the distribution's tail is beyond what floats resolve.
MOST_CONFIDENCE = 0.9999
_GATE = re.compile(r"([a-z]+):(\d+(?:\.\d+)?)%")


@click.command()
@click.argument("a")
@click.argument("b", required=False)
@click.option(
    "--run", "measure", is_flag=True, help="A and B are TOML configurations; measure them here in turns: A B A B …"
)
@click.option(
    "--pairs", default=5, show_default=True, type=click.IntRange(min=2), metavar="N", help="Trials of each, with --run."
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Stop a trial of --run after X seconds.",
)
@click.option(
    "--run-dir",
    metavar="DIR",
    help=f"Where --run leaves its trials and {DOCUMENT}. [default: runs/<UTC time>-compare]",
)
@click.option(
    "--metric", default="tokens_per_sec", show_default=True, type=click.Choice(tuple(METRICS)), help="What to compare."
)
@click.option(
    "--confidence",
    default=0.98,
    show_default=True,
    type=click.FloatRange(0.5, MOST_CONFIDENCE, min_open=True),
    metavar="X",
    help="Of the interval, and of the verdict.",
)
@click.option(
    "--fail-if",
    metavar="slower:P%",
    help="Exit with 1 if the verdict is slower and the ratio says so by P percent or more: A's speed over B's, less 1 "
    "(not a bound of the interval). Likewise faster:P%, B's speed over A's; of max_memory_mib larger:P% and smaller:P%. "
    "Exit with 1 too if there is no verdict.",
)
@click.option("--allow-unlike", is_flag=True, help="Compare although model, data or batch differ.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("--output", metavar="FILE", help="Write the same document to FILE.")
@click.option("--quiet", is_flag=True, help="Print nothing but what --json asks for.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def compare(a: str, b: str | None, measure: bool, **given: Any) -> int:
    """Say whether B is faster or slower than A, or takes more or less memory, and how sure that is.

    A and B are results (files, or folders of runs) with several trials each (`mtb train --repeat`), or with --run two
    configurations. A alone is the folder of an earlier --run, whose trials are compared again. The verdict is "faster",
    "slower" (of max_memory_mib "larger", "smaller"), "no difference seen" or, with too few trials, "undetermined".
    Everything in which A and B are unlike is listed; other work (model, data, batch) is refused.
    """
    gate = _gate(given["fail_if"], given["metric"])
    if given["output"] is not None:
        check_output(given["output"], inputs=[a] if b is None else [a, b])
    if not measure:
        return _report(_read(a, b, given), paired=b is None, gate=gate, given=given)
    if b is None:
        raise ConfigError("--run measures two configurations; name both A and B.")
    folder = Path(given["run_dir"] or f"runs/{datetime.now(UTC):%Y%m%dT%H%M%SZ}-compare")
    sides = _measured(a, b, folder, given)
    return _report(sides, paired=True, gate=gate, given=given, kept=folder / DOCUMENT)


def _gate(text: str | None, metric: str) -> tuple[str, float] | None:
    if text is None:
        return None
    less, more = METRICS[metric].less, METRICS[metric].more
    found = _GATE.fullmatch(text.strip())
    if found is None or found[1] not in (less, more):
        raise ConfigError(
            f"--fail-if is {text!r}; with --metric {metric} it must be {less}:P% or {more}:P%, for example {less}:3%."
        )
    return found[1], float(found[2]) / 100


def _read(a: str, b: str | None, given: dict[str, Any]) -> tuple[list[Record], list[Record]]:
    from mtb_report.report.soundness import fault_of  # noqa: PLC0415  (help needs none of it)
    from mtb_report.results import read_record  # noqa: PLC0415

    from .interleaved import read_pairs  # noqa: PLC0415

    for name in ("run_dir", "timeout_s"):
        if given[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has a meaning with --run only; leave it out or add --run.")
    sides = read_pairs(Path(a)) if b is None else ([read_record(a)], [read_record(b)])
    for record in (*sides[0], *sides[1]):
        if record.kind != "training":
            raise ConfigError(
                f"{record.path} holds {record.kind!r}; only results of trainings have independent trials to compare."
            )
        fault = fault_of(record)
        if fault is not None:
            raise ConfigError(f"{record.path} is a broken result: {fault}. Measure it again, or take it away.")
        if record.status not in (None, "success"):
            raise ConfigError(
                f"{record.path} is of a run that ended early (status {record.status}); compare complete runs."
            )
    return sides


def _measured(a: str, b: str, folder: Path, given: dict[str, Any]) -> tuple[list[Record], list[Record]]:
    from mtb_report.sweep.shape import check_seconds  # noqa: PLC0415
    from mtb_report.training import ending_on_request  # noqa: PLC0415

    from .interleaved import measure_pairs, read_settings, unlike_work  # noqa: PLC0415

    if given["timeout_s"] is not None:
        check_seconds("--timeout-s", given["timeout_s"])
    settings = read_settings(Path(a)), read_settings(Path(b))
    unlike = unlike_work(*settings)
    if unlike and not given["allow_unlike"]:
        raise ConfigError(
            f"{a} and {b} set other work, so that their times cannot be compared (A | B): {'; '.join(unlike)}. Compare "
            "the same model and data, or say --allow-unlike."
        )
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--run-dir {folder} is not empty; name a new folder or remove this one.")

    def progress(text: str) -> None:
        if not given["quiet"]:
            click.echo(text, err=True)

    with ending_on_request():
        return measure_pairs(
            *settings, pairs=given["pairs"], folder=folder, timeout_s=given["timeout_s"], on_progress=progress
        )


def _report(
    sides: tuple[list[Record], list[Record]],
    *,
    paired: bool,
    gate: tuple[str, float] | None,
    given: dict[str, Any],
    kept: Path | None = None,
) -> int:
    from mtb_core import dumps  # noqa: PLC0415

    from .document import blind, change_of, judge, make_document, show  # noqa: PLC0415

    document = make_document(
        sides,
        paired=paired,
        metric=given["metric"],
        confidence=given["confidence"],
        allow_unlike=given["allow_unlike"],
        argv=sys.argv,
    )
    complaint = None if gate is None else judge(document, *gate)
    if gate is not None:
        change = change_of(document, gate[0])
        document["gate"] = {
            "fail_if": gate[0],
            "percent": gate[1] * 100,
            "change_percent": None if change is None else change * 100,
            "passed": complaint is None,
        }
        note = blind(document, *gate)
        document["notes"] += [] if note is None else [note]
    if given["as_json"]:
        click.echo(dumps(document, indent=2))
    elif not given["quiet"]:
        show(document)
    if kept is not None:
        write_output(str(kept), document)
        if not given["quiet"]:
            click.echo(f"comparison: {kept}; another --metric of the same trials: mtb compare {kept.parent}", err=True)
    if given["output"] is not None:
        write_output(given["output"], document)
    if complaint is not None:
        raise CheckFailed(complaint)
    return 0
