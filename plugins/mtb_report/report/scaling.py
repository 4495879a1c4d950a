"""How runs relate to one another: scaling efficiency, and what sharding saves against DDP. Pure functions.

Definitions, with T the time of a step and n the number of ranks:

- strong scaling, where the global batch of the run on one rank and of that on n is the same: T1 / (n · Tn);
- weak scaling, where the batch of each rank is the same: (throughput_n / n) / throughput_1.

A run is related to another only if both did the same work (`work_of`), both succeeded, and neither is known to be an
invalid measurement. Where several would do, the closest one is taken: the same folder first, then the same number of
steps, then as many sequences at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from mtb_report.compare.unlike import NUMERICS_KEYS, WORK_KEYS
from mtb_report.results import Record

#: Scaling has rules of its own for the batch; the kind of a record is looked at before.
_WORK = tuple(name for name in (*WORK_KEYS, *NUMERICS_KEYS) if name not in ("benchmark", "global_batch_size"))

NO_DDP = "no DDP run"


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
    """What was computed, on what, by what: equal for runs whose times may be set against each other.

    The number of ranks and the batch are left out. Threads are part of it where they do the work, on a CPU.
    """
    return (*_work_of_any_threads(record), _threads(record))


def _work_of_any_threads(record: Record) -> tuple[Any, ...]:
    return (
        record.kind,
        *(_hashable(_said(record, name)) for name in _WORK),
        record.get("device"),
        record.get("device_name") or record.environment.get("cpu_model"),
        record.get("activation_checkpointing"),
        record.environment.get("torch"),
    )


def _threads(record: Record) -> Any:
    return record.environment.get("torch_threads") if record.get("device") == "cpu" else None


def _said(record: Record, name: str) -> Any:
    value = record.get(name)
    return setting(record, name) if value is None else value


def _hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, list | dict) else value


def scheme_of(record: Record) -> tuple[Any, ...]:
    """How the work was spread over ranks."""
    options = record.get("strategy_options") or {}
    return (
        record.get("strategy"),
        tuple(sorted((k, repr(v)) for k, v in options.items())),
        record.get("gradient_sync_mode"),
    )


def is_plain(record: Record) -> bool:
    """Whether every rank holds all of the model and its state, and sends whole gradients: `single`, and DDP as such."""
    options = record.get("strategy_options") or {}
    return (
        record.get("strategy") in ("single", "ddp")
        and not options.get("zero1")
        and options.get("comm_hook") in (None, "none")
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
    if not _succeeded(record):
        return Efficiency(None, reason=f"run: {record.status}")
    ones = [r for r in records if r.get("world_size") == 1]
    bases = _like(record, [r for r in ones if work_of(r) == work_of(record)])
    if ranks == 1 and record in bases:
        return Efficiency(1.0, base=record)
    base = min(bases, key=lambda r: (_unfit(r), _far(record, r)), default=None)
    if base is None:
        others = [r for r in ones if _work_of_any_threads(r) == _work_of_any_threads(record)]
        return Efficiency(None, reason="1-rank run has other threads" if _like(record, others) else "no 1-rank run")
    if not _succeeded(base):
        return Efficiency(None, reason=f"1-rank run: {base.status}")
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


def _like(record: Record, alone: Sequence[Record]) -> list[Record]:
    """Of runs on one rank, those of the record's strategy; where there are none, those of `single`."""
    same = [r for r in alone if scheme_of(r) == scheme_of(record)]
    return same or [r for r in alone if r.get("strategy") == "single"]


def against_ddp(record: Record, records: Sequence[Record]) -> AgainstDdp:
    """`record` against the DDP run of the same work, batch and number of ranks.

    Memory is set against DDP's only where both mean the same by it, and each rank had as many sequences at a time.
    """
    bases = [
        r
        for r in records
        if r.get("strategy") == "ddp"
        and is_plain(r)
        and r.get("world_size") == record.get("world_size")
        and work_of(r) == work_of(record)
        and _known_and_equal(r, record, "global_batch_size")
    ]
    base = min(bases, key=lambda r: (_unfit(r), bool(_unlike_memory(record, r)), _far(record, r)), default=None)
    if base is None:
        return AgainstDdp(None, reason=NO_DDP)
    if not _succeeded(record):
        return AgainstDdp(None, reason=f"run: {record.status}")
    if not _succeeded(base):
        return AgainstDdp(None, reason=f"DDP run: {base.status}")
    if base.performance_valid is False:
        return AgainstDdp(None, reason="DDP run not valid")
    unlike = _unlike_memory(record, base)
    saving = None if unlike else _ratio(record, base, "max_memory_mib")
    longer = _ratio(record, base, "step_time_ms")
    return AgainstDdp(
        base,
        None if saving is None else 1 - saving,
        None if longer is None else longer - 1,
        unlike,
    )


def _unlike_memory(record: Record, base: Record) -> str:
    """Why the memory of both says nothing about each other; empty where it does."""
    if record.get("memory_kind") != base.get("memory_kind"):
        return "memory of another kind"
    if _said(record, "batch_size_per_rank") != _said(base, "batch_size_per_rank"):
        return "other batch per rank"
    return ""


def _succeeded(record: Record) -> bool:
    """Whether nothing is known of a failure: older files do not always say."""
    return record.status in (None, "success")


def _unfit(other: Record) -> tuple[bool, ...]:
    return not _succeeded(other), other.performance_valid is False


def _far(record: Record, other: Record) -> tuple[bool, ...]:
    names = ("steps", "batch_size_per_rank")
    return batch_folder(other) != batch_folder(record), *(_said(other, n) != _said(record, n) for n in names)


def _batch_of_a_rank(record: Record) -> float | None:
    whole, ranks = record.get("global_batch_size"), record.get("world_size")
    return whole / ranks if whole and ranks else None


def _known_and_equal(a: Record, b: Record, name: str) -> bool:
    return a.get(name) is not None and a.get(name) == b.get(name)


def _ratio(a: Record, b: Record, name: str) -> float | None:
    return a.get(name) / b.get(name) if a.get(name) and b.get(name) else None
