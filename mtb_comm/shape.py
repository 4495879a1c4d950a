"""The shape of a communication document, so that an earlier one can be trusted before anything is measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .definitions import OPERATIONS

_NUMBER = (int, float)
_NONE = type(None)
_Kinds = tuple[type, ...]

#: Keys that tables, plots, comparisons and calibrations need, and the kinds of their values.
_DOCUMENT: dict[str, _Kinds] = {
    "exit_reason": (str,), "failure": (dict, _NONE), "world_size": (int,), "groups": (int,), "backend": (str, _NONE),
    "device": (str, _NONE), "results": (list,), "fits": (list,), "environment": (dict,), "provenance": (dict,),
    "performance_valid": (bool,), "performance_invalid_reasons": (list,),
}  # fmt: skip
_SERIES: dict[str, _Kinds] = {
    "operation": (str,), "dtype": (str, _NONE), "reduction": (str, _NONE), "in_place": (bool, _NONE),
    "split": (str, _NONE), "world_size": (int,),
}  # fmt: skip
_ROW: dict[str, _Kinds] = {
    **_SERIES, "size_bytes": (int,), "count": (int,), "iterations": (int,), "time_ms": (dict, _NONE),
    "algbw_gb_per_sec": (*_NUMBER, _NONE), "busbw_gb_per_sec": (*_NUMBER, _NONE), "wrong": (int, _NONE),
    "busiest_rank": (int, _NONE), "splits_bytes": (list, _NONE), "status": (str,), "reason": (str, _NONE),
}  # fmt: skip
_TIMES: dict[str, _Kinds] = dict.fromkeys(("mean", "min", "p50", "p95", "p99", "max"), _NUMBER)
_FIT: dict[str, _Kinds] = {
    **_SERIES, "size_bytes_min": _NUMBER, "size_bytes_max": _NUMBER, "alpha_s": _NUMBER,
    "alpha_error_s": (*_NUMBER, _NONE), "beta_gb_per_sec": _NUMBER, "beta_error_gb_per_sec": (*_NUMBER, _NONE),
    "relative_error_rms": _NUMBER, "relative_error_max": _NUMBER,
}  # fmt: skip
EXIT_REASONS = ("done", "stopped", "interrupted", "failed")


def shape_fault(document: Mapping[str, Any]) -> str | None:
    """Error text if a value of the document is missing or of another type; None if all are right."""
    fault = _fault(document, _DOCUMENT, "it")
    if fault is None and document["exit_reason"] not in EXIT_REASONS:
        fault = f"exit_reason is {document['exit_reason']!r}"
    if fault is None and document["failure"] is not None:
        fault = _fault(document["failure"], {"text": (str,)}, "failure")
    rows = () if fault is not None else enumerate(document["results"])
    fits = () if fault is not None else enumerate(document["fits"])
    faults = [_row_fault(row, f"results[{index}]") for index, row in rows]
    faults += [_fault(fit, _FIT, f"fits[{index}]") for index, fit in fits]
    return fault or next((found for found in faults if found is not None), None)


def _row_fault(row: Any, where: str) -> str | None:
    fault = _fault(row, _ROW, where)
    if fault is None and row["operation"] not in OPERATIONS:
        fault = f"{where} has the operation {row['operation']!r}"
    if fault is None and row["time_ms"] is not None:
        fault = _fault(row["time_ms"], _TIMES, f"time_ms of {where}")
    return fault


def _fault(value: Any, keys: Mapping[str, _Kinds], where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where} is no object"
    for key, kinds in keys.items():
        if key not in value:
            return f"{where} lacks {key!r}"
        found = value[key]
        # In Python True is a number.
        if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
            return f"{where} holds {found!r} as {key!r}"[:200]
    return None
