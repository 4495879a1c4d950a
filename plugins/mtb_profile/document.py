"""The analysis as a JSON document; times in µs with all three decimals of the nanoseconds."""

from __future__ import annotations

from typing import Any

import attrs

from .across import Arrivals
from .analysis import Analysis, CollectiveRow, RankAnalysis
from .breakdown import Times
from .losses import Losses
from .stragglers import Straggler
from .verdict import Verdict

SCHEMA_VERSION = 1


def document(analysis: Analysis, verdict: Verdict, losses: Losses | None = None) -> dict[str, Any]:
    """What ``--json`` prints; every key is described in ``docs/profile.md``."""
    out: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "trace_analysis",
        "world_size": analysis.world_size,
        "ranks": [_rank(rank, waiting_is_known=analysis.waiting_is_known) for rank in analysis.ranks],
        "step_time_us": {str(number): round(ns / 1e3, 3) for number, ns in analysis.step_times.items()},
        "arrivals": [_arrivals(a) for a in analysis.arrivals],
        "stragglers": [_straggler(s) for s in analysis.stragglers],
        "suspects": [_straggler(s) for s in analysis.suspects],
        "matched_collectives": len(analysis.matching.matched),
        "unmatched_collectives": dict(analysis.matching.unmatched),
        "clock_shift_us": {str(rank): ns / 1e3 for rank, ns in analysis.shifts.items()},
        "verdict": verdict.bound,
        "verdict_text": verdict.text,
        "evidence": verdict.evidence,
        "uncertain_because": verdict.uncertain_because,
        "advice": verdict.advice,
        "notes": analysis.notes,
    }
    if losses is not None:
        out["mfu"] = {
            "measured_ms": losses.measured_ms,
            "ideal_ms": losses.ideal_ms,
            "mfu": losses.mfu,
            "losses": [attrs.asdict(loss) for loss in losses.losses],
            "repair_order": [loss.name for loss in losses.in_order_of_repair()],
            "notes": losses.notes,
        }
    return out


def _times(times: Times) -> dict[str, float]:
    return {
        "span_us": times.span / 1e3,
        "compute_us": times.compute / 1e3,
        "communication_us": times.communication / 1e3,
        "overlapped_us": times.overlapped / 1e3,
        "exposed_us": times.exposed / 1e3,
        "memory_us": times.memory / 1e3,
        "idle_us": times.idle / 1e3,
        "memory_total_us": times.memory_total / 1e3,
    }


def _rank(rank: RankAnalysis, *, waiting_is_known: bool) -> dict[str, Any]:
    trace = rank.view.trace
    return {
        "rank": rank.rank,
        "window": rank.view.window,
        **_times(rank.times),
        "waiting_us": rank.waiting / 1e3 if waiting_is_known else None,
        "idle_by_phase_us": {name: ns / 1e3 for name, ns in rank.idle_by_phase.items()},
        "collectives": [_collective(row) for row in rank.collectives],
        "steps": [{"step": number, **_times(times)} for number, times in rank.steps.items()],
        "step_source": rank.view.steps.source,
        "own_time_us": {
            str(step): {name: ns / 1e3 for name, ns in phases.items()} for step, phases in rank.own.items()
        },
        "device": "device" if trace.on_device else "cpu",
        "device_name": trace.device_name,
        "backend": trace.backend,
        "file": trace.path.name,
    }


def _collective(row: CollectiveRow) -> dict[str, Any]:
    return {
        "operation": row.operation,
        "group": row.group or None,
        "group_size": row.group_size,
        "dtype": row.dtype,
        "count": row.count,
        "bytes": row.message_bytes,
        "time_us": row.time / 1e3,
        "transfer_us": None if row.transfer is None else row.transfer / 1e3,
        "algbw_gb_per_sec": row.algbw,
        "busbw_gb_per_sec": row.busbw,
    }


def _arrivals(row: Arrivals) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "collectives": row.collectives,
        "last": row.last,
        "mean_lateness_us": round(row.lateness / 1e3, 3),
        "last_by_phase": row.phases,
        "waiting_us": row.waiting / 1e3,
        "transfer_us": row.transfer / 1e3,
    }


def _straggler(row: Straggler) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "phase": row.phase,
        "excess_us": row.phase_excess / 1e3,
        "step_excess_us": row.excess / 1e3,
        "compute_excess_us": row.compute_excess / 1e3,
        "share_of_step": row.share,
        "slower_steps": row.slower,
        "steps": row.steps,
        "chance": row.chance,
    }
