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

if TYPE_CHECKING:
    from mtb_report.results import Record

#: Figures that can be compared, and whether less of them is better.
METRICS = {
    "tokens_per_sec": False,
    "step_time_ms": True,
    "data_time_ms": True,
    "forward_backward_ms": True,
    "optimizer_step_ms": True,
    "checkpoint_time_ms": True,
    "mfu": False,
}
#: Above it an interval says next to nothing, and the distribution's tail is beyond what floats resolve.
MOST_CONFIDENCE = 0.9999
_GATE = re.compile(r"(slower|faster):(\d+(?:\.\d+)?)%")


@click.command()
@click.argument("a")
@click.argument("b")
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
@click.option("--run-dir", metavar="DIR", help="Where --run leaves its trials. [default: runs/<UTC time>-compare]")
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
    "(not a bound of the interval). Likewise faster:P%, B's speed over A's. Exit with 1 too if there is no verdict.",
)
@click.option("--allow-unlike", is_flag=True, help="Compare although model, data or batch differ.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("--output", metavar="FILE", help="Write the same document to FILE.")
@click.option("--quiet", is_flag=True, help="Print nothing but what --json asks for.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def compare(a: str, b: str, measure: bool, **given: Any) -> int:
    """Say whether B is faster or slower than A, and how sure that is.

    A and B are results (files, or folders of runs) with several trials each (`mtb train --repeat`), or with --run two
    configurations. The verdict is "faster", "slower", "no difference seen" or, with too few trials, "undetermined".
    Everything in which A and B are unlike is listed; other work (model, data, batch) is refused.
    """
    gate = _gate(given["fail_if"])
    if given["output"] is not None:
        check_output(given["output"], inputs=[a, b])
    sides = _measured(a, b, given) if measure else _read(a, b, given)
    return _report(sides, paired=measure, gate=gate, given=given)


def _gate(text: str | None) -> tuple[str, float] | None:
    if text is None:
        return None
    found = _GATE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--fail-if is {text!r}; it must be slower:P% or faster:P%, for example slower:3%.")
    return found[1], float(found[2]) / 100


def _read(a: str, b: str, given: dict[str, Any]) -> tuple[list[Record], list[Record]]:
    from mtb_report.report.soundness import fault_of  # noqa: PLC0415  (help needs none of it)
    from mtb_report.results import read_record  # noqa: PLC0415

    for name in ("run_dir", "timeout_s"):
        if given[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has a meaning with --run only; leave it out or add --run.")
    sides = read_record(a), read_record(b)
    for record in sides:
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
    return [sides[0]], [sides[1]]


def _measured(a: str, b: str, given: dict[str, Any]) -> tuple[list[Record], list[Record]]:
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
    folder = Path(given["run_dir"] or f"runs/{datetime.now(UTC):%Y%m%dT%H%M%SZ}-compare")
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
) -> int:
    from mtb_core import dumps  # noqa: PLC0415

    from .document import blind, change_of, judge, make_document, show  # noqa: PLC0415

    document = make_document(
        sides,
        paired=paired,
        metric=given["metric"],
        lower_is_better=METRICS[given["metric"]],
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
    if given["output"] is not None:
        write_output(given["output"], document)
    if complaint is not None:
        raise CheckFailed(complaint)
    return 0
