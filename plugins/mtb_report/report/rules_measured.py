"""Rules for collectives, routing, memory pressure, profiles and checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtb_report.results import Record

from .cells import plural
from .findings import Finding, known, text_of
from .plots import size_text
from .scaling import setting
from .sections.checks import matches_of

#: busbw that grows by more than this from the second largest size to the largest has not reached its limit.
STILL_RISING = 0.1
UNSTABLE = 1.2
IMBALANCED = 1.5


def communication(record: Record) -> Iterator[Finding]:
    """Bandwidth and latency of collectives."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in record.rows:
        if row.get("busbw_gb_per_sec") and row.get("size_bytes"):
            split = f" ({row['split']} split)" if row.get("split") else ""
            groups.setdefault(f"{row.get('operation')}{split} on {row.get('world_size')} ranks", []).append(row)
    yield Finding(
        "meaning",
        "definition",
        "busbw is the bandwidth each rank's link must have had, by nccl-tests' definition; small messages show latency instead. "
        "The figure of one operation does not stand for another's.",
    )
    for name, rows in groups.items():
        yield from _bandwidth(name, sorted(rows, key=lambda row: row["size_bytes"]))
    wrong = [row for row in record.rows if row.get("wrong")]
    if wrong:
        yield Finding(
            "unusual",
            "wrong",
            f"{plural(len(wrong), 'point')} gave wrong elements: do not use this backend before that is understood.",
        )
    skipped = [row for row in record.rows if row.get("status") == "skipped"]
    if skipped:
        yield Finding(
            "unusual", "skipped-points", f"{plural(len(skipped), 'point')} skipped: {skipped[0].get('reason')}."
        )


def _bandwidth(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    best = max(rows, key=lambda row: row["busbw_gb_per_sec"])
    yield Finding(
        "meaning",
        "best-busbw",
        f"{name}: at most {best['busbw_gb_per_sec']:.3g} GB/s busbw, at {size_text(best['size_bytes'])}.",
        performance=True,
    )
    if len(rows) > 1 and rows[-1]["busbw_gb_per_sec"] > rows[-2]["busbw_gb_per_sec"] * (1 + STILL_RISING):
        yield Finding(
            "next",
            "larger-sizes",
            f"{name}: bandwidth still rises at {size_text(rows[-1]['size_bytes'])}; measure larger messages (-e).",
            performance=True,
        )
    times = [row["time_ms"] for row in rows if isinstance(row.get("time_ms"), Mapping)]
    ratios = [t["p95"] / t["p50"] for t in times if t.get("p95") and t.get("p50")]
    if ratios and max(ratios) > UNSTABLE:
        yield Finding(
            "unusual",
            "unstable-times",
            f"{name}: the 95th percentile is up to {max(ratios):.1f} times the median; above {UNSTABLE} something disturbs it.",
        )


def moe(record: Record) -> Iterator[Finding]:
    """Balance, drops and communication of token routing."""
    for point in record.rows or [record.values]:
        imbalance = point.get("load_imbalance_ratio")
        if imbalance:
            yield Finding(
                "meaning",
                "imbalance",
                f"The fullest expert got {imbalance:.2f} times the mean; all others wait for it.",
            )
            if imbalance > IMBALANCED:
                yield Finding(
                    "unusual",
                    "imbalanced",
                    f"An imbalance of {imbalance:.2f} wastes {1 - 1 / imbalance:.0%} of the experts' time.",
                )
                yield Finding(
                    "next", "balance", "Try a balancing loss, another gate, or experts that choose (--routing expert)."
                )
        rate = point.get("drop_rate")
        if rate:
            yield Finding(
                "unusual",
                "drops",
                f"{rate:.1%} of the slots were dropped for want of capacity; those tokens skip that expert.",
            )
            yield Finding(
                "next", "capacity", "Raise the capacity factor, and see what padding it costs: mtb moe sweep."
            )
        share = point.get("communication_share")
        if share is not None:
            yield Finding(
                "meaning",
                "moe-communication",
                f"Communication, waiting included, takes {share:.0%} of forward and backward.",
                performance=True,
            )


def memory_pressure(record: Record) -> Iterator[Finding]:
    """Whether a model fits."""
    tier, peak, parameters = text_of(record, "tier"), known(record, "max_memory_mib"), known(record, "parameters")
    size = f" ({parameters:,} parameters)" if parameters else ""
    if record.status == "oom":
        yield Finding(
            "meaning",
            "does-not-fit",
            f"The {tier or 'unknown'} tier{size} does not fit with strategy {record.get('strategy')} at this batch size.",
        )
        yield Finding("next", "shard", f"{_room_for(record)}.")
    elif peak:
        told = "" if record.performance_valid is False else f": the fullest rank peaked at {peak:,.0f} MiB"
        yield Finding("meaning", "fits", f"The {tier or 'unknown'} tier{size} fits{told}.")


def _room_for(record: Record) -> str:
    """What is left to try for a model that does not fit."""
    stage = (record.get("strategy_options") or {}).get("stage")
    sharded = record.get("strategy") in ("fsdp", "fsdp1") or stage == 3
    tries = ["shard over more ranks" if sharded else "shard more (fsdp, deepspeed stage 3)"]
    tries += (
        [] if setting(record, "activation_checkpointing") else ["recompute activations (--activation-checkpointing)"]
    )
    tries += [] if setting(record, "batch_size") == 1 else ["take a smaller --batch-size"]
    text = ", or ".join(tries)
    return text[0].upper() + text[1:]


def profile(record: Record) -> Iterator[Finding]:
    """What bounds a step, by the analysis of its traces."""
    document = record.raw if record.kind == "trace_analysis" else record.get("profile") or {}
    text = document.get("verdict_text") or document.get("verdict")
    if text:
        yield Finding("meaning", "verdict", f"By its traces the step is {document.get('verdict')}. {text}")
    for evidence in document.get("evidence") or ():
        yield Finding("meaning", "evidence", str(evidence))
    for row in document.get("stragglers") or ():
        share = row.get("share_of_step")
        extra = f", {share:.0%} of the step" if share is not None else ""
        yield Finding(
            "unusual", "straggler", f"Rank {row.get('rank')} is slower than the others in {row.get('phase')}{extra}."
        )
    for advice in document.get("advice") or ():
        yield Finding("next", "advice", str(advice))


def checked(record: Record) -> Iterator[Finding]:
    """Checks that hold or do not: checkpoints, conformance, tensor parallelism."""
    matches = matches_of(record.values)
    if matches:
        unequal = [part for part, same in matches.items() if not same]
        said = "every part is equal" if not unequal else f"these differ: {', '.join(unequal)}"
        yield Finding(
            "unusual" if unequal else "meaning", "matches", f"Two checkpoints were compared part by part; {said}."
        )
    if isinstance(record.get("ok"), bool):
        fine = record.get("ok")
        problems = [f"{p.get('file')}: {p.get('problem')}" for p in record.get("problems") or ()]
        said = "every file is as it was published" if fine else f"it is damaged: {'; '.join(problems)}"
        yield Finding("meaning" if fine else "unusual", "integrity", f"One checkpoint was verified; {said}.")
    if record.get("conformant") is not None:
        passed, failed = known(record, "passed") or 0, known(record, "failed") or 0
        yield Finding(
            "unusual" if failed else "meaning",
            "conformance",
            f"Strategy {record.get('strategy')}: {passed:g} checks passed, {failed:g} failed.",
        )
        if record.get("complete") is False:
            yield Finding("next", "whole-kit", "Run the whole kit: a selection of the checks is no certificate.")
    worst, allowed = known(record, "grad_max_error"), known(record, "atol")
    if worst is not None and allowed:
        yield Finding(
            "meaning",
            "error",
            f"The largest error of a gradient is {worst:.1e}, {worst / allowed:.1%} of what is allowed.",
        )
