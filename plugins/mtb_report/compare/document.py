"""What ``mtb compare`` says, as a JSON document and as text; every key is described in ``docs/compare.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.table import Table

from mtb_core import ConfigError, provenance
from mtb_report.results import Record
from mtb_report.wording import by_kind, console

from .unlike import NUMERICS, PLACE, SETTING, WORK, Difference, differences
from .verdict import UNDETERMINED, compare_trials

SCHEMA_VERSION = 1

_GROUPS = {
    WORK: "other work: times say little about each other",
    NUMERICS: "other arithmetic: see loss and norms too",
    PLACE: "other machine, software or source",
    SETTING: "other settings",
}


def make_document(
    sides: tuple[Sequence[Record], Sequence[Record]],
    *,
    paired: bool,
    metric: str,
    lower_is_better: bool,
    confidence: float,
    allow_unlike: bool,
    argv: Sequence[str],
) -> dict[str, Any]:
    """The comparison of the trials of A with those of B.

    Raises:
        ConfigError: A and B did other work, and that was not allowed; or a figure cannot be compared.
    """
    a, b = sides[0][0], sides[1][0]
    unlike = differences(a, b)
    deciding = [d for d in unlike if d.decides]
    if deciding and not allow_unlike:
        raise ConfigError(
            f"A and B did other work, so that their times cannot be compared (A | B): {'; '.join(map(str, deciding))}. "
            "Compare runs of the same model, data and global batch, or say --allow-unlike."
        )
    trials, missing = _pairs(sides, metric) if paired else _unpaired(sides, metric)
    try:
        found = compare_trials(*trials, paired=paired, lower_is_better=lower_is_better, confidence=confidence)
    except ValueError as error:
        raise ConfigError(f"--metric {metric} cannot be compared: {error}. Choose another one.") from error
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "comparison",
        "metric": metric,
        "ratio_of": "speed of B over speed of A",
        "ratio": found.ratio,
        "confidence": found.confidence,
        "ratio_interval": None if found.low is None else [found.low, found.high],
        "verdict": found.verdict,
        "n": list(found.n),
        "method": found.method,
        "seen_from_percent": None if found.seen_from is None else found.seen_from * 100,
        "notes": [n for n in (found.note, missing, None if paired else _APART_IN_TIME) if n],
        "a": _side(sides[0], trials[0]),
        "b": _side(sides[1], trials[1]),
        "differences": [attrs.asdict(d) for d in unlike],
        "like": not [d for d in unlike if d.group != SETTING],
        "warnings": [*_invalid("A", sides[0]), *_invalid("B", sides[1])],
        "provenance": provenance(argv),
    }


_APART_IN_TIME = (
    "A and B were not measured in turns: a change of the machine between them is not in the interval; compare --run "
    "has it in"
)


def _pairs(sides: tuple[Sequence[Record], Sequence[Record]], metric: str) -> tuple[list[list[float]], str | None]:
    """The figures of both halves of each pair, and a note of the pairs that lack one and are left out as a whole.

    Figures of one half would otherwise stand beside those of another pair, which were measured at another time.
    """
    rows = [[row for record in records for row in _rows(record)] for records in sides]
    both = [(a.get(metric), b.get(metric)) for a, b in zip(*rows, strict=True)]
    whole = [pair for pair in both if None not in pair]
    left = len(both) - len(whole)
    note = f"{left} of {len(both)} pairs are left out: a half of them has no {metric}" if left else None
    return [[pair[side] for pair in whole] for side in (0, 1)], note


def _unpaired(sides: tuple[Sequence[Record], Sequence[Record]], metric: str) -> tuple[list[list[float]], str | None]:
    """The figure of each trial that has it, and a note of those that do not."""
    rows = [row for records in sides for record in records for row in _rows(record)]
    trials = [
        [row[metric] for record in records for row in _rows(record) if row.get(metric) is not None] for records in sides
    ]
    left = len(rows) - sum(map(len, trials))
    return trials, f"{left} of {len(rows)} trials are left out: they have no {metric}" if left else None


def _rows(record: Record) -> Sequence[Mapping[str, Any]]:
    """The independent trials; a run without repeats is one trial."""
    return record.trials or [record.values]


def _side(records: Sequence[Record], trials: Sequence[float]) -> dict[str, Any]:
    first = records[0]
    return {
        "label": first.label,
        "files": [{"path": _relative(r.path), "digest": r.digest} for r in records],
        "trials": list(trials),
        "performance_valid": _all_valid(records),
        "performance_invalid_reasons": list(
            dict.fromkeys(reason for r in records for reason in r.performance_invalid_reasons)
        ),
        "conversions": list(first.conversions),
    }


def _all_valid(records: Sequence[Record]) -> bool | None:
    said = [r.performance_valid for r in records]
    return None if None in said else all(said)


def _relative(path: Path) -> str:
    """As given where that is relative; else the file's name, since the folders are the machine's."""
    return path.name if path.is_absolute() else str(path)


def _invalid(name: str, records: Sequence[Record]) -> list[str]:
    reasons = by_kind(reason for r in records for reason in r.performance_invalid_reasons)
    if any(r.performance_valid is False for r in records):
        return [f"{name} says of itself that its times are not valid: {'; '.join(reasons) or 'no reason given'}"]
    return []


def judge(document: Mapping[str, Any], what: str, least: float) -> str | None:
    """Why the gate ``what:least`` does not let this pass; None where it does.

    It needs a verdict: where none could be reached, that is the complaint.
    """
    if document["verdict"] == UNDETERMINED:
        return f"Whether B is {what} cannot be told: {document['notes'][0]}."
    ratio = document["ratio"]
    change = 1 / ratio - 1 if what == "slower" else ratio - 1
    if document["verdict"] == what and change >= least:
        low, high = document["ratio_interval"]
        return (
            f"B is {what} than A by {change:.1%}, and --fail-if allows less than {least:.1%} (ratio of speeds "
            f"{ratio:.4f}, {document['confidence']:.0%} interval {low:.4f} to {high:.4f})."
        )
    return None


def show(document: Mapping[str, Any]) -> None:
    """The document for people, on stdout."""
    out = console()
    a, b, n = document["a"], document["b"], document["n"]
    out.print(f"A: {a['label']} ({n[0]} trials)   B: {b['label']} ({n[1]} trials)   {document['metric']}")
    if document["ratio"] is not None:
        line = f"B's speed is {document['ratio']:.4f} times A's"
        if document["ratio_interval"] is not None:
            low, high = document["ratio_interval"]
            line += f", {document['confidence']:.0%} interval {low:.4f} to {high:.4f}"
        out.print(line + f" ({document['method']})")
    out.print(f"Verdict: [bold]{document['verdict']}[/bold]")
    if document["seen_from_percent"] is not None:
        out.print(
            f"With this spread and so many trials, a change of {document['seen_from_percent']:.2g}% would be seen "
            "four times out of five."
        )
    for text in (*document["warnings"], *document["notes"]):
        out.print(f"Note: {text}.", markup=False)
    if document["differences"]:
        out.print(_differences_table([Difference(**d) for d in document["differences"]]))
    else:
        out.print("A and B are alike in everything that is recorded.")


def _differences_table(rows: Sequence[Difference]) -> Table:
    table = Table("what", "A", "B", "kind", title="In what A and B are unlike", title_justify="left")
    for row in rows:
        table.add_row(row.name, _cell(row.a), _cell(row.b), _GROUPS[row.group])
    return table


def _cell(value: Any) -> str:
    return "not known" if value is None else str(value)
