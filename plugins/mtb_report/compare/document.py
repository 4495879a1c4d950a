"""What ``mtb compare`` says, as a JSON document and as text; every key is described in ``docs/compare.md``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.table import Table

from mtb_core import ConfigError
from mtb_evidence import provenance
from mtb_report.results import Record
from mtb_report.wording import by_kind, console

from .metrics import METRICS
from .unlike import NUMERICS, PLACE, SETTING, WORK, Difference, differences, shown
from .verdict import UNDETERMINED, compare_trials

SCHEMA_VERSION = 1

#: Percent from which on a change that would be seen is no figure to show: no two things are compared for it.
_BLIND = 1000.0
_NOT_FINITE = ("loss_nonfinite", "loss_first_nonfinite")

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
    confidence: float,
    allow_unlike: bool,
    argv: Sequence[str],
) -> dict[str, Any]:
    """The comparison of the trials of A with those of B.

    Raises:
        ConfigError: A and B did other work, and that was not allowed; or their figures cannot be compared.
    """
    a, b = sides[0][0], sides[1][0]
    unlike = differences(a, b)
    deciding = [d for d in unlike if d.decides]
    if deciding and not allow_unlike:
        raise ConfigError(
            f"A and B did other work, so that their times cannot be compared (A | B): {'; '.join(map(str, deciding))}. "
            "Compare runs of the same model, data and global batch, or say --allow-unlike."
        )
    kind = _memory_kind(a, b) if metric == "max_memory_mib" else None
    trials, missing = _pairs(sides, metric) if paired else _unpaired(sides, metric)
    try:
        found = compare_trials(*trials, paired=paired, metric=METRICS[metric], confidence=confidence)
    except ValueError as error:
        raise ConfigError(f"--metric {metric} cannot be compared: {error}. Choose another one.") from error
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "comparison",
        "metric": metric,
        "performance_valid": _all_valid([*sides[0], *sides[1]]),
        "performance_invalid_reasons": [*_invalid("A", sides[0]), *_invalid("B", sides[1])],
        "warnings": _warnings(sides),
        "ratio_of": "{0} of B over {0} of A".format(METRICS[metric].quantity),
        "ratio": found.ratio,
        "confidence": found.confidence,
        "ratio_interval": None if found.low is None else [found.low, found.high],
        "verdict": found.verdict,
        "n": list(found.n),
        "method": found.method,
        "seen_from_percent": None if found.seen_from is None else found.seen_from * 100,
        "notes": [n for n in (found.note, missing, kind, None if paired else _APART_IN_TIME) if n],
        "a": _side(sides[0], trials[0]),
        "b": _side(sides[1], trials[1]),
        "differences": [attrs.asdict(d) for d in unlike],
        "like": not [d for d in unlike if d.group != SETTING],
        "provenance": provenance(argv),
    }


_APART_IN_TIME = (
    "A and B were not measured in turns: a change of the machine between them is not in the interval; compare --run "
    "has it in"
)


_MEMORY_KINDS = {
    "process_rss": "memory is the peak resident set of the fullest rank's process: of a small model most of it is "
    "libraries, so that a ratio near 1 says little of the strategies",
    "cuda_allocated": "memory is the peak of what torch had allocated on the fullest rank's GPU",
}


def _memory_kind(a: Record, b: Record) -> str:
    """What memory means in both; where it is not the same, they cannot be compared."""
    kinds = a.get("memory_kind"), b.get("memory_kind")
    if kinds[0] != kinds[1] and None not in kinds:
        raise ConfigError(
            f"Memory of A is {kinds[0]}, and of B {kinds[1]}, which is not the same thing. Compare runs on one device."
        )
    return _MEMORY_KINDS.get(kinds[0] or kinds[1] or "", "a file does not say what its memory is of")


def _pairs(sides: tuple[Sequence[Record], Sequence[Record]], metric: str) -> tuple[list[list[float]], str | None]:
    """The figures of both halves of each pair, and a note of the pairs that lack one and are left out as a whole.

    Figures of one half would otherwise stand beside those of another pair, which were measured at another time.
    """
    rows = [[row for record in records for row in _rows(record)] for records in sides]
    both = [(a.get(metric), b.get(metric)) for a, b in zip(*rows, strict=True)]
    whole = [pair for pair in both if None not in pair]
    left = len(both) - len(whole)
    note = f"left out: {left} of {len(both)} pairs, of which a half has no {metric}" if left else None
    return [[pair[side] for pair in whole] for side in (0, 1)], note


def _unpaired(sides: tuple[Sequence[Record], Sequence[Record]], metric: str) -> tuple[list[list[float]], str | None]:
    """The figure of each trial that has it, and a note of those that do not."""
    rows = [row for records in sides for record in records for row in _rows(record)]
    trials = [
        [row[metric] for record in records for row in _rows(record) if row.get(metric) is not None] for records in sides
    ]
    left = len(rows) - sum(map(len, trials))
    return trials, f"left out: {left} of {len(rows)} trials, which have no {metric}" if left else None


def _rows(record: Record) -> Sequence[Mapping[str, Any]]:
    """The independent trials; a run without repeats is one trial."""
    return record.trials or [record.values]


def _side(records: Sequence[Record], trials: Sequence[float]) -> dict[str, Any]:
    first = records[0]
    return {
        "label": first.label,
        "files": [{"path": _relative(r.path), "digest": r.digest} for r in records],
        "trials": list(trials),
        "mean": statistics.fmean(trials) if trials else None,
        "std": statistics.stdev(trials) if len(trials) > 1 else None,
        "performance_valid": _all_valid(records),
        "performance_invalid_reasons": list(
            dict.fromkeys(reason for r in records for reason in r.performance_invalid_reasons)
        ),
        "conversions": list(first.conversions),
    }


def _all_valid(records: Sequence[Record]) -> bool | None:
    """False where one says that it is not valid; None where one does not say, and none is not."""
    said = [r.performance_valid for r in records]
    return False if False in said else None if None in said else True


def _relative(path: Path) -> str:
    """As given where that is relative; else the file's name, since the folders are the machine's."""
    return path.name if path.is_absolute() else str(path)


def _invalid(name: str, records: Sequence[Record]) -> list[str]:
    """Why the times of a side are not valid, in one text; its numbers are those of one of the trials."""
    if all(r.performance_valid is not False for r in records):
        return []
    reasons = by_kind(reason for r in records for reason in r.performance_invalid_reasons)
    return [f"{name}: {'; '.join(reasons) or 'no reason given'}"]


def _warnings(sides: tuple[Sequence[Record], Sequence[Record]]) -> list[str]:
    out = []
    for name, records in zip("AB", sides, strict=True):
        broken = next((r.get(key) for r in records for key in _NOT_FINITE if r.get(key)), None)
        if broken:
            out.append(f"the loss of {name} was {broken}: the speed of a training that is broken tells nothing")
    if sides[0][0].digest == sides[1][0].digest:
        out.append("A and B are the same file")
    return out


def change_of(document: Mapping[str, Any], what: str) -> float | None:
    """By how much B is `what`, a verdict, as a fraction, see `Metric.change`; None where there is no ratio."""
    ratio = document["ratio"]
    return None if ratio is None else METRICS[document["metric"]].change(ratio, what)


def judge(document: Mapping[str, Any], what: str, least: float) -> str | None:
    """Why the gate ``what:least`` does not let this pass; None where it does.

    It closes where the verdict is `what` and the change, by the ratio itself, is `least` or more. A bound of the interval
    is not held against `least`: the interval decides whether there is a difference at all. Where no verdict could be
    reached, that is the complaint.
    """
    doubt = f" Not valid: {'; '.join(document['performance_invalid_reasons'])}."
    doubt = doubt if document["performance_valid"] is False else ""
    if document["verdict"] == UNDETERMINED:
        return f"Whether B is {what} cannot be told: {document['notes'][0]}.{doubt}"
    change = change_of(document, what)
    if document["verdict"] == what and change is not None and change >= least:
        low, high = document["ratio_interval"]
        return (
            f"B is {what} than A by {change:.1%}, and --fail-if allows less than {least:.1%} "
            f"({document['ratio_of']}: {document['ratio']:.4f}, {document['confidence']:.0%} interval {low:.4f} to {high:.4f}).{doubt}"
        )
    return None


def blind(document: Mapping[str, Any], what: str, least: float) -> str | None:
    """What must be known of a gate that lets this pass: a change that it is to find would most likely not be seen."""
    seen = document["seen_from_percent"]
    if seen is None or seen <= least * 100 or document["verdict"] == what:
        return None
    return (
        f"a change of {least:.1%} would be seen less than four times out of five, so that the gate passes says little; take "
        "more trials"
    )


def show(document: Mapping[str, Any]) -> None:
    """The document for people, on stdout; what takes the worth from the verdict stands before it."""
    out = console()
    sides = (
        f"{side}: {document[side.lower()]['label']} ({n} trial{'' if n == 1 else 's'})"
        for side, n in zip("AB", document["n"], strict=True)
    )
    out.print("   ".join((*sides, document["metric"])), markup=False)
    invalid = document["performance_valid"] is False
    if invalid:
        out.print("[bold]Not valid[/bold] as measurements of performance, and so neither is the verdict:")
        for text in document["performance_invalid_reasons"]:
            out.print(f"  {text}", markup=False)
    for text in document["warnings"]:
        out.print(f"Warning: {text}.", markup=False)
    metric = METRICS[document["metric"]]
    for side in (s for s in "AB" if document[s.lower()]["mean"] is not None):
        mean, std = document[side.lower()]["mean"], document[side.lower()]["std"]
        of = "one trial" if std is None else "mean ± standard deviation of the trials"
        out.print(f"{side}: {metric.shown(mean, std)} ({of})", markup=False)
    if document["ratio"] is not None:
        line = f"B's {metric.quantity} is {document['ratio']:.4f} times A's"
        if document["ratio_interval"] is not None:
            low, high = document["ratio_interval"]
            line += f", {document['confidence']:.0%} interval {_ratio(low)} to {_ratio(high)}"
        out.print(line + f" ({document['method']})")
    out.print(f"Verdict{', of measurements that are not valid' if invalid else ''}: [bold]{document['verdict']}[/bold]")
    if document["seen_from_percent"] is not None:
        out.print(f"With this spread and so many trials, {_seen(document['seen_from_percent'])}.")
    for text in document["notes"]:
        out.print(f"Note: {text}.", markup=False)
    if document["differences"]:
        out.print(_differences_table([Difference(**d) for d in document["differences"]]))
    else:
        out.print("A and B are alike in everything that is recorded.")


def _ratio(bound: float) -> str:
    return f"{bound:.4f}" if 0.001 < bound < 1000 else f"{bound:.1e}"


def _seen(percent: float) -> str:
    if percent >= _BLIND:
        return "hardly any change would be seen: take more trials"
    return f"a change of {percent:.{0 if percent >= 10 else 1}f}% would be seen four times out of five"


def _differences_table(rows: Sequence[Difference]) -> Table:
    table = Table("what", "A", "B", "kind", title="In what A and B are unlike", title_justify="left")
    for row in rows:
        table.add_row(row.name, shown(row.a), shown(row.b), _GROUPS[row.group])
    return table
