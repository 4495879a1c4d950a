"""Rules for results that are about several runs: sweeps, comparisons, failure drills, Megatron's configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from mtb_report.results import Record

from .cells import plural
from .findings import Finding, known, text_of

_FAILED = ("failed", "failed_parse", "timeout", "partial")


def sweep(record: Record) -> Iterator[Finding]:
    """How the cells ended, the fastest valid one, what fits."""
    counts = Counter(str(cell.get("status") or "not run") for cell in record.rows)
    listed = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in counts.items())
    yield Finding("meaning", "cells", f"The sweep has {plural(len(record.rows), 'cell')}: {listed}.")
    best = _fastest(record)
    if best is not None:
        rate = best["figures"]["tokens_per_sec"]
        kind = "valid cell" if best.get("performance_valid") else "cell (not known whether valid)"
        yield Finding("meaning", "fastest", f"The fastest {kind} is {_labels(best)}, with {rate:,.0f} tokens a second.")
    for fit in record.get("largest_that_fits") or ():
        beyond = fit.get("first_that_does_not")
        limit = f"{beyond} does not" if beyond is not None else "none that was tried is too large"
        largest = "none fits" if fit.get("largest") is None else f"the largest that fits is {fit.get('largest')}"
        yield Finding("meaning", "largest", f"Of {fit.get('axis')} {largest}; {limit}.")
    for cell in record.rows:
        if cell.get("status") in _FAILED:
            reason = str(cell.get("reason") or cell.get("failure_type") or "no reason is recorded").rstrip(".")
            yield Finding("unusual", "cell-failed", f"Cell {_labels(cell)} ended as {cell.get('status')}: {reason}.")
    invalid = sum(cell.get("performance_valid") is False for cell in record.rows)
    if invalid:
        yield Finding(
            "unusual", "cells-not-valid", f"{plural(invalid, 'cell')} of {len(record.rows)} gave no valid measurement."
        )
    failed = [cell for cell in record.rows if cell.get("status") in _FAILED]
    if failed and all(cell.get("failure_type") == "configuration" for cell in failed):
        yield Finding(
            "next", "correct", "Correct the settings that were refused: running those cells again changes nothing."
        )
    elif failed:
        yield Finding(
            "next", "retry", "Look at the logs of the cells that failed, and run the sweep again with --retry."
        )
    if counts["not run"] and record.execution_complete is False:
        yield Finding("next", "go-on", "Run the same command again: cells that were not run yet are.")


def _fastest(record: Record) -> Mapping[str, Any] | None:
    """None where cells trained models of several sizes: the smallest would be the fastest."""
    sizes = {(cell.get("figures") or {}).get("parameters") for cell in record.rows} - {None}
    cells = [
        cell
        for cell in record.rows
        if cell.get("status") == "success"
        and cell.get("performance_valid") is not False
        and (cell.get("figures") or {}).get("tokens_per_sec")
    ]
    return max(cells, key=lambda cell: cell["figures"]["tokens_per_sec"], default=None) if len(sizes) < 2 else None


def _labels(cell: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in (cell.get("labels") or {}).items()) or str(cell.get("id"))


def comparison(record: Record) -> Iterator[Finding]:
    """The verdict, and how sure it is."""
    verdict, ratio, interval = text_of(record, "verdict"), known(record, "ratio"), record.get("ratio_interval")
    confidence, seen = known(record, "confidence"), known(record, "seen_from_percent")
    if ratio is not None:
        sure = ""
        if interval and confidence:
            sure = f" ({confidence:.0%} confidence: {interval[0]:.3f} to {interval[1]:.3f})"
        doubt = ", of measurements that are not valid" if record.performance_valid is False else ""
        of = "peak memory" if record.get("metric") == "max_memory_mib" else "speed"
        yield Finding("meaning", "ratio", f"B has {ratio:.3f} times the {of} of A{sure}. Verdict{doubt}: {verdict}.")
    if seen is not None:
        yield Finding(
            "meaning", "seen-from", f"A difference from {seen:.1f}% on would have been seen with these trials."
        )
    yield from _more_trials(record, verdict)
    if record.get("like") is False:
        yield Finding(
            "unusual", "unlike", "A and B are unlike in more than a setting; see the differences in the file."
        )
    for text in record.get("warnings") or ():
        yield Finding("unusual", "warning", f"{str(text).rstrip('.')}.")


def _more_trials(record: Record, verdict: str | None) -> Iterator[Finding]:
    trials = record.get("n") or ()
    paired = (text_of(record, "method") or "").startswith("paired")
    if verdict == "no difference seen":
        how = "more --pairs" if paired else "more trials, in turns: mtb compare --run"
        yield Finding("next", "more-trials", f"If a smaller difference matters, take {how}.")
    elif verdict == "undetermined" and 0 in trials:
        yield Finding("next", "other-metric", "Choose another --metric: a side has no figure of this one.")
    elif verdict == "undetermined" and all(n > 1 for n in trials):
        yield Finding(
            "next", "other-trials", "Measure both anew: trials without any spread are copies, not measurements."
        )
    elif verdict == "undetermined":
        yield Finding(
            "next", "more-trials", "Measure both with --repeat 5 or more: one trial on a side tells no difference."
        )


def drill(record: Record) -> Iterator[Finding]:
    """Whether what was broken on purpose was survived."""
    for case in record.rows:
        by_itself = "by itself" if case.get("auto_recovered") else f"by {case.get('recovery_mode') or 'unknown means'}"
        what = f"{str(case.get('failure_type') or 'a failure').replace('_', ' ')} of rank {case.get('crash_rank')} at step {case.get('crash_at_step')}"
        fine = str(case.get("status", "")).startswith("recovered")
        yield Finding(
            "meaning" if fine else "unusual",
            "drill",
            f"The drill was a {what}; it ended as {case.get('status')}, {by_itself}.",
        )
        if case.get("checkpoint_unchanged") is False:
            yield Finding("unusual", "checkpoint-harmed", "The checkpoint changed during the crash, which it must not.")
    exact = (record.get("verification") or {}).get("exact_match")
    if exact is not None:
        said = "the same as" if exact else "not the same as"
        yield Finding(
            "meaning" if exact else "unusual",
            "drill-exact",
            f"The recovered training is {said} one without the crash, part by part.",
        )


def megatron(record: Record) -> Iterator[Finding]:
    """What was split over what; the bubble is theory, not a measurement."""
    split = [
        f"{record.get(name)} for {what}"
        for name, what in (("tp", "tensors"), ("pp", "layers"), ("dp", "data"))
        if record.get(name)
    ]
    if split:
        yield Finding("meaning", "split", f"Ranks of each group: {', '.join(split)}.")
    bubble = (record.get("runtime") or {}).get("pipeline_bubble_proxy")
    if bubble:
        yield Finding(
            "meaning",
            "bubble",
            f"By theory the pipeline idles {bubble:.0%} of the step, waiting to be filled and drained.",
        )
        yield Finding("next", "micro-batches", "More micro-batches in a step make the pipeline's bubble smaller.")
    if record.kind == "megatron_matrix":
        planned, fine = known(record, "expected_config_count"), known(record, "successful_config_count")
        if planned is not None and fine is not None:
            yield Finding(
                "meaning" if planned == fine else "unusual",
                "matrix",
                f"{fine:g} of {planned:g} configurations succeeded.",
            )
