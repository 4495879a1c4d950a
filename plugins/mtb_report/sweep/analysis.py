"""What follows from the cells of a sweep together. Pure functions on the rows of ``sweep.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .plan import group_of

#: Said wherever efficiency is shown.
EFFICIENCY = {
    "strong": "T1 / (n Tn): step time on one rank over ranks times step time, the global batch being the same",
    "weak": "tokens a second and rank on n ranks over those on one rank, the batch of each rank being the same",
}


def add_efficiency(rows: Sequence[dict[str, Any]], scaling: str) -> None:
    """Give each row its ``efficiency`` and ``efficiency_base_ranks``, by `EFFICIENCY`.

    The base is the row of the same group with the fewest ranks; where that is not one rank, figures are relative to
    it (m Tm / (n Tn)). None where the row, or its base, has no time.
    """
    for row in rows:
        base = _base(row, rows)
        row["efficiency"] = row["efficiency_base_ranks"] = None
        if base is None or not _time(row) or not _time(base):
            continue
        ranks, least = _ranks(row), _ranks(base)
        row["efficiency_base_ranks"] = least
        if scaling == "strong":
            row["efficiency"] = least * _time(base) / (ranks * _time(row))
        else:
            row["efficiency"] = (_rate(row) / ranks) / (_rate(base) / least)


def _base(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The cell with the fewest ranks among those that differ from `row` in nothing else."""
    own = group_of(row["labels"], "nproc")
    return min((other for other in rows if group_of(other["labels"], "nproc") == own), key=_ranks, default=None)


def _ranks(row: Mapping[str, Any]) -> int:
    return int(row["labels"]["nproc"])


def _time(row: Mapping[str, Any]) -> float:
    return float(row["figures"].get("step_time_ms") or 0.0)


def _rate(row: Mapping[str, Any]) -> float:
    return float(row["figures"].get("tokens_per_sec") or 0.0)


def add_errors(
    rows: Sequence[dict[str, Any]],
    against: Mapping[str, Any],
    metrics: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """Give each row the largest relative deviation of its losses and gradient norms from those of its reference.

    The reference is the row with the labels `against` that is alike in all others. `metrics` are the metrics lines
    of rank 0 by cell. Steps that both have and in which both are finite are compared; ``error_steps`` says how many.
    """
    for row in rows:
        reference = next((other for other in rows if _is_reference(other, row, against)), None)
        lines = metrics.get(row["id"], ())
        others = {line["global_step"]: line for line in metrics.get(reference["id"], ())} if reference else {}
        row["reference"] = None if reference is None else reference["id"]
        pairs = [(line, others[line["global_step"]]) for line in lines if line["global_step"] in others]
        row["error_steps"] = len(pairs)
        for name in ("loss", "grad_norm"):
            row[f"{name}_error"] = _deviation(
                [(a[name], b[name]) for a, b in pairs if a.get(name) is not None and b.get(name)]
            )


def _is_reference(other: Mapping[str, Any], row: Mapping[str, Any], against: Mapping[str, Any]) -> bool:
    fits = all(other["labels"][name] == value for name, value in against.items())
    return fits and group_of(other["labels"], *against) == group_of(row["labels"], *against)


def _deviation(pairs: Sequence[tuple[float, float]]) -> float | None:
    return max((abs(a - b) / abs(b) for a, b in pairs), default=None)


def largest_that_fits(rows: Sequence[Mapping[str, Any]], axis: str) -> list[dict[str, Any]]:
    """For each group of rows that differ in `axis` alone: the largest value that succeeded, and the first that did not.

    ``first_that_does_not`` is None where all that were tried fit: the largest is then at least that.
    """
    out = []
    for group in dict.fromkeys(group_of(row["labels"], axis) for row in rows):
        members = sorted((r for r in rows if group_of(r["labels"], axis) == group), key=lambda r: r["labels"][axis])
        fits = [r["labels"][axis] for r in members if r["status"] == "success"]
        fails = [r["labels"][axis] for r in members if r["status"] == "oom"]
        out.append(
            {
                "labels": {k: v for k, v in members[0]["labels"].items() if k != axis},
                "axis": axis,
                "largest": max(fits, default=None),
                "first_that_does_not": min(fails, default=None),
            }
        )
    return out
