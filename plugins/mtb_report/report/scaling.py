"""How runs relate to one another: scaling efficiency, and what sharding saves against DDP. Pure functions.

Definitions, with T the time of a step and n the number of ranks:

- strong scaling, where the global batch of the run on one rank and of that on n is the same: T1 / (n · Tn);
- weak scaling, where the batch of each rank is the same: (throughput_n / n) / throughput_1.

A run is related to another only if both did the same work (`work_of`) and neither is known to be an invalid
measurement. Where several would do, the closest one is taken: the same folder first, then the same number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from mtb_report.results import Record

_SIZES = ("seq_length", "vocab_size", "d_model", "n_heads", "n_layers")


@attrs.frozen
class Efficiency:
    """`value` is a share of the ideal, None where there is none, for `reason`; `base` is the run on one rank."""

    value: float | None
    kind: Literal["strong", "weak"] | None = None
    base: Record | None = None
    reason: str = ""


@attrs.frozen
class AgainstDdp:
    """What a run saves of DDP's memory, and by how much its step is longer; None where a figure is not known."""

    base: Record | None
    memory_saving: float | None = None
    step_difference: float | None = None
    reason: str = ""


def setting(record: Record, name: str) -> Any:
    """A setting of the training: from the configuration, or from the model's own where it stands apart."""
    for place in (record.get("config"), record.get("model_config"), (record.get("config") or {}).get("model_config")):
        if isinstance(place, dict) and place.get(name) is not None:
            return place[name]
    return None


def work_of(record: Record) -> tuple[Any, ...]:
    """What was computed, on what: equal for runs whose times may be set against each other. Ranks and batch left out."""
    return (
        record.get("parameters"),
        *(setting(record, name) for name in _SIZES),
        record.get("precision"),
        record.get("reduce_dtype"),
        record.get("device"),
        record.get("device_name") or record.environment.get("cpu_model"),
        record.get("activation_checkpointing"),
    )


def scheme_of(record: Record) -> tuple[Any, ...]:
    """How the work was spread over ranks."""
    options = record.get("strategy_options") or {}
    return (
        record.get("strategy"),
        tuple(sorted((k, repr(v)) for k, v in options.items())),
        record.get("gradient_sync_mode"),
    )


def batch_folder(record: Record) -> Path:
    """The folder that holds the runs that were made together, each in a folder of its own (as sweeps make them) or not."""
    folder = record.path.parent
    if record.path.name != "result.json":
        return folder
    return folder.parent.parent if folder.name == "run" else folder.parent


def efficiency(record: Record, records: Sequence[Record]) -> Efficiency:
    """The scaling efficiency of `record` among `records`, by the module's definitions."""
    ranks, time, rate = record.get("world_size"), record.get("step_time_ms"), record.get("tokens_per_sec")
    if not ranks or not time or not rate:
        return Efficiency(None, reason="unknown")
    alike = [r for r in records if r.get("world_size") == 1 and work_of(r) == work_of(record)]
    bases = [r for r in alike if scheme_of(r) == scheme_of(record)]
    bases = bases or [r for r in alike if r.get("strategy") == "single"]
    if ranks == 1 and record in bases:
        return Efficiency(1.0, base=record)
    base = _closest(record, bases)
    if base is None:
        return Efficiency(None, reason="no 1-rank run")
    if base.performance_valid is False:
        return Efficiency(None, reason="1-rank run not valid")
    base_time, base_rate = base.get("step_time_ms"), base.get("tokens_per_sec")
    if not base_time or not base_rate:
        return Efficiency(None, reason="unknown")
    if _known_and_equal(record, base, "global_batch_size"):
        return Efficiency(base_time / (ranks * time), "strong", base)
    if _batch_of_a_rank(record) is not None and _batch_of_a_rank(record) == _batch_of_a_rank(base):
        return Efficiency(rate / ranks / base_rate, "weak", base)
    return Efficiency(None, reason="other batch at 1 rank")


def against_ddp(record: Record, records: Sequence[Record]) -> AgainstDdp:
    """`record` against the DDP run of the same work, batch and number of ranks."""
    bases = [
        r
        for r in records
        if r.get("strategy") == "ddp"
        and r.get("world_size") == record.get("world_size")
        and work_of(r) == work_of(record)
        and r.get("global_batch_size") == record.get("global_batch_size")
    ]
    base = _closest(record, bases)
    if base is None:
        return AgainstDdp(None, reason="no DDP run")
    if base.performance_valid is False:
        return AgainstDdp(None, reason="DDP run not valid")
    if base.status not in (None, "success"):
        return AgainstDdp(None, reason=f"DDP run: {base.status}")
    same_kind = record.get("memory_kind") == base.get("memory_kind")
    saving = _ratio(record, base, "max_memory_mib") if same_kind else None
    longer = _ratio(record, base, "step_time_ms")
    return AgainstDdp(
        base,
        None if saving is None else 1 - saving,
        None if longer is None else longer - 1,
    )


def _closest(record: Record, candidates: Sequence[Record]) -> Record | None:
    def distance(other: Record) -> tuple[bool, ...]:
        return (
            other.performance_valid is False,
            batch_folder(other) != batch_folder(record),
            other.get("steps") != record.get("steps"),
        )

    return min(candidates, key=distance, default=None)


def _batch_of_a_rank(record: Record) -> float | None:
    whole, ranks = record.get("global_batch_size"), record.get("world_size")
    return whole / ranks if whole and ranks else None


def _known_and_equal(a: Record, b: Record, name: str) -> bool:
    return a.get(name) is not None and a.get(name) == b.get(name)


def _ratio(a: Record, b: Record, name: str) -> float | None:
    return a.get(name) / b.get(name) if a.get(name) and b.get(name) else None
