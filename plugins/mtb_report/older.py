"""Results of the schema before ``schema_version``, in today's names and units.

What is known of it: memory is in MiB though its name says mb; the standard deviation is the population's; bandwidth is
algbw in 10^9 bytes a second, with S = ranks × elements for gather and scatter, as nccl-tests defines S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mtb_core import summarize

_MEMORY = "memory: `max_cuda_memory_mb` is in MiB (2^20 bytes), torch's allocator"
_DEVICE_MEMORY = "memory: `peak_device_memory_mb` is in MiB, all that was in use on the device, by nvidia-smi"
_SPREAD = "spread: sample standard deviation and 95% interval computed from the trials; the file has the population's"
_POPULATION = "spread: the standard deviation is the population's; the trials are not in the file"
_BANDWIDTH = "bandwidth: `bandwidth_gbps` is algbw in 10^9 bytes/s; busbw = algbw × factor (nccl-tests)"
_LATENCY = "time: `latency_ms` is a mean; the file has no distribution"

_RENAMED = {
    "max_cuda_memory_mb": "max_memory_mib",
    "peak_device_memory_mb": "max_memory_mib",
    "grad_norm_mean": "grad_norm",
    "returncode": "exit_code",
}
_APART = {
    "benchmark",
    "environment",
    "provenance",
    "summary",
    "repeats",
    "results",
    "trials",
    "records",
    "failure_handling",
    "performance_valid",
    "performance_invalid_reasons",
    "execution_complete",
}
_STATUS = {"ok": "success", "success": "success", "compatibility_smoke": "success", "oom": "oom", "timeout": "timeout"}


def convert_older(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Record` that follow from an older document; kinds that are not known keep their figures."""
    kind = str(raw["benchmark"])
    notes: list[str] = []
    out: dict[str, Any] = {
        "kind": kind,
        "status": _status(raw),
        "values": {_RENAMED.get(k, k): v for k, v in raw.items() if k not in _APART},
        "environment": _environment(raw.get("environment")),
        "provenance": dict(raw.get("provenance") or {}),
        "execution_complete": raw.get("execution_complete"),
        "performance_valid": raw.get("performance_valid"),
        "performance_invalid_reasons": list(raw.get("performance_invalid_reasons") or ()),
        "conversions": notes,
    }
    _add_place(out["values"], raw)
    special = _SPECIAL.get(kind)
    if special is not None:
        special(out, raw, notes)
    return out


def _status(raw: Mapping[str, Any]) -> str | None:
    said = raw.get("status")
    if said is not None:
        return _STATUS.get(said, "failed")
    if "exact_match" in raw:
        return "success" if raw["exact_match"] else "failed"
    return None


def _environment(old: Mapping[str, Any] | None) -> dict[str, Any]:
    if not old:
        return {}
    devices = [{"name": old["gpu"], "memory_mib": None}] * int(old.get("gpu_count") or 1) if old.get("gpu") else []
    cuda = {
        "version": old.get("cuda"),
        "cudnn": old.get("cudnn"),
        "nccl": old.get("nccl"),
        "driver": old.get("driver"),
        "devices": devices,
    }
    named = ("cuda", "cudnn", "nccl", "driver", "gpu", "gpu_count", "python", "torch")
    return {
        "python": old.get("python"),
        "torch": old.get("torch"),
        "libraries": {k: v for k, v in old.items() if k not in named},
        "cuda": cuda if any(old.get(k) is not None for k in named[:6]) else None,
    }


def _add_place(values: dict[str, Any], raw: Mapping[str, Any]) -> None:
    if isinstance(values.get("device"), str):
        values["device"] = values["device"].partition(":")[0]
    gpu = (raw.get("environment") or {}).get("gpu")
    if gpu is not None:
        values["device_name"] = gpu
    if isinstance(values.get("strategy"), str):
        name, found, stage = values["strategy"].partition("_zero")
        if found and stage.isdigit():
            values["strategy"] = name
            values["strategy_options"] = {"stage": int(stage)}


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(k, k): v for k, v in row.items()}


def _training(out: dict[str, Any], raw: Mapping[str, Any], notes: list[str]) -> None:
    values = out["values"]
    if "max_cuda_memory_mb" in raw:
        values["memory_kind"] = "cuda_allocated"
        notes.append(_MEMORY)
    out["trials"] = [_figures(row) for row in raw.get("repeats") or ()]
    if not out["trials"] and raw.get("step_time_ms") is not None:
        out["trials"] = [{k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}]
    out["summary"] = _summary(raw.get("summary"), out["trials"], notes)


def _summary(
    old: Mapping[str, Any] | None, trials: list[dict[str, Any]], notes: list[str]
) -> dict[str, Mapping[str, Any]]:
    """Spreads of today's kind from the trials where the file has them, else the file's, labelled."""
    out: dict[str, Mapping[str, Any]] = {}
    for name, spread in (old or {}).items():
        figure = _RENAMED.get(name, name)
        known = [row.get(figure) for row in trials]
        again = summarize(known) if len(known) > 1 and None not in known else None
        if again is None:
            out[figure] = {"n": len(trials) or None, "ci95": None, "std_kind": "population", **spread}
        else:
            out[figure] = {**again, "std_kind": "sample", "std_population": spread.get("std")}
    if out:
        notes.append(_SPREAD if any(s["std_kind"] == "sample" for s in out.values()) else _POPULATION)
    return out


def _communication(out: dict[str, Any], raw: Mapping[str, Any], notes: list[str]) -> None:
    notes += [_BANDWIDTH, _LATENCY]
    out["rows"] = [_collective(row, raw) for row in raw.get("results") or ()]
    if any(row["busbw_gb_per_sec"] is not None and row.get("split") == "uneven" for row in out["rows"]):
        notes.append("busbw of uneven splits is by the factor of equal ones, as nccl-tests would say it")


def _collective(row: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    ranks = row.get("world_size") or raw.get("world_size")
    rate = row.get("bandwidth_gbps")
    factor = bus_factor(str(row.get("operation")), ranks)
    time = row.get("latency_ms")
    return {
        **row,
        "dtype": raw.get("dtype"),
        "split": row.get("split_mode"),
        "size_bytes": row.get("bytes"),
        "iterations": raw.get("iters"),
        "time_ms": None
        if time is None
        else {"mean": time, "min": None, "p50": None, "p95": None, "p99": None, "max": None},
        "algbw_gb_per_sec": rate,
        "busbw_gb_per_sec": None if rate is None or factor is None else rate * factor,
        "wrong": None,
        "reason": row.get("reason") or row.get("error"),
    }


def bus_factor(operation: str, ranks: int | None) -> float | None:
    """The ratio busbw / algbw, by nccl-tests, ``doc/PERFORMANCE.md``; None where it is not known."""
    if not ranks:
        return None
    part = (ranks - 1) / ranks
    if operation == "all_reduce":
        return 2 * part
    if operation in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return part
    return 1.0 if operation in ("broadcast", "reduce", "send_recv") else None


def _memory_pressure(out: dict[str, Any], raw: Mapping[str, Any], notes: list[str]) -> None:
    config = raw.get("config") or {}
    out["values"]["tier"] = config.get("tier")
    if "max_cuda_memory_mb" in raw:
        out["values"]["memory_kind"] = "cuda_allocated"
        notes.append(_MEMORY)
    out["summary"] = _summary(raw.get("summary"), [], notes)


def _megatron(out: dict[str, Any], raw: Mapping[str, Any], notes: list[str]) -> None:
    values = out["values"]
    own = raw.get("metrics")
    trials = [dict(t.get("metrics") or {}) for t in raw.get("trials") or ()] or ([dict(own)] if own else [])
    out["trials"] = [_figures(row) for row in trials]
    out["summary"] = _summary(raw.get("summary"), out["trials"], notes)
    for name in ("step_time_ms", "tokens_per_sec", "max_memory_mib"):
        mean = out["summary"].get(name, {}).get("mean")
        known = mean if mean is not None else next((row.get(name) for row in out["trials"]), None)
        values[name] = known
    values["memory_kind"] = "device_used"
    notes.append(_DEVICE_MEMORY)
    out["rows"] = list(raw.get("trials") or ())


def _matrix(out: dict[str, Any], raw: Mapping[str, Any], _notes: list[str]) -> None:
    out["rows"] = list(raw.get("records") or ())


def _faults(out: dict[str, Any], raw: Mapping[str, Any], _notes: list[str]) -> None:
    out["rows"] = list(raw.get("failure_handling") or ())
    if out["rows"] and out["status"] is None:
        recovered = all(str(row.get("status", "")).startswith("recovered") for row in out["rows"])
        out["status"] = "success" if recovered else "failed"


_SPECIAL: dict[str, Callable[[dict[str, Any], Mapping[str, Any], list[str]], None]] = {
    "training": _training,
    "communication": _communication,
    "memory_pressure": _memory_pressure,
    "megatron": _megatron,
    "megatron_matrix": _matrix,
    "fault_tolerance": _faults,
}
