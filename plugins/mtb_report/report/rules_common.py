"""Rules for results of every kind: how it ended, whether it is a measurement, where it comes from."""

from __future__ import annotations

from collections.abc import Iterator

from mtb_report.results import Record

from .findings import Finding, text_of

_ENDS = {
    "stopped": "It was stopped on request before its planned end",
    "interrupted": "It was interrupted before its planned end",
    "failed": "The run failed",
}
#: Kinds without times of their own, for which a machine would have to be quiet.
_NOT_TIMED = (
    "conformance", "checkpoint_verification", "fault_tolerance", "sweep", "trace_analysis", "tensor_parallel",
    "tensor_parallel_mlp", "sequence_parallel",
)  # fmt: skip


def common(record: Record) -> Iterator[Finding]:
    """Findings about the record as such."""
    yield from _end(record)
    yield from _validity(record)
    yield from _origin(record)


def _end(record: Record) -> Iterator[Finding]:
    reason = text_of(record, "exit_reason")
    failure = record.get("failure") or {}
    if reason in _ENDS:
        cause = failure.get("text") or failure.get("message")
        said = f": {cause}" if cause else "."
        yield Finding("unusual", "ended-early", f"{_ENDS[reason]}{said if said.endswith(('.', '!')) else said + '.'}")
        yield Finding(
            "next", "run-to-the-end", "Run it to its end first: figures of a part are not those of the whole."
        )
    elif record.status in ("failed", "oom", "timeout", "failed_parse"):
        why = text_of(record, "failure_reason") or text_of(record, "reason")
        yield Finding("unusual", "ended-early", f"It did not succeed: {record.status}{f', {why}' if why else ''}.")


def _validity(record: Record) -> Iterator[Finding]:
    if record.kind in _NOT_TIMED or (record.kind == "training" and record.get("steps") == 0):
        return  # there are no times that could be valid
    if record.performance_valid is False:
        reasons = "; ".join(record.performance_invalid_reasons) or "no reason is recorded"
        told = (
            " Its times, rates and memory are not told here for that; they stand in the file, as a sign that it works, not "
            "of how fast it is."
        )
        if record.kind == "profile":
            told = " What is said of its step is of the step as it was profiled."
        yield Finding(
            "unusual",
            "not-valid",
            f"It is no valid measurement of performance: {reasons}.{told}",
        )
        if record.kind != "profile":  # which never is valid: the profiler itself slows it
            yield Finding(
                "next",
                "make-valid",
                "Remove what made the measurement invalid, and run it again before comparing anything.",
            )
    elif record.performance_valid is None:
        yield Finding(
            "unusual",
            "validity-unknown",
            "The file does not say whether the machine was quiet and the measurement valid; take its times with caution.",
        )


def _origin(record: Record) -> Iterator[Finding]:
    origin = record.provenance
    if origin.get("git_dirty") is True:
        yield Finding(
            "unusual",
            "dirty",
            "The working tree had changes, so the recorded revision alone does not repeat this result.",
        )
    missing = origin.get("missing_fields")
    if missing:
        yield Finding("unusual", "provenance", f"Its provenance lacks {', '.join(missing)}.")
    elif origin.get("complete") is not True:
        yield Finding(
            "unusual", "provenance", "Its provenance is not complete: where it comes from cannot be told for sure."
        )
    if record.older:
        yield (
            Finding(
                "meaning",
                "older",
                "The file is of the schema before `schema_version`; " + "; ".join(record.conversions) + ".",
            )
            if record.conversions
            else Finding("meaning", "older", "The file is of the schema before `schema_version`.")
        )
