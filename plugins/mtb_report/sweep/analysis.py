"""What follows from the cells of a sweep together. Pure functions on the rows of ``sweep.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .plan import group_of, in_file_order

#: Said wherever efficiency is shown.
EFFICIENCY = {
    "strong": "T1 / (n Tn): step time on one rank over ranks times step time, the global batch being the same",
    "weak": "tokens a second and rank on n ranks over those on one rank, the batch of each rank being the same",
}


def add_efficiency(rows: Sequence[dict[str, Any]], scaling: str) -> None:
    """Give each row its ``efficiency``, ``efficiency_base_ranks`` and ``efficiency_reason``, by `EFFICIENCY`.

    The base is the row of the same group with the fewest ranks; where that is not one rank, figures are relative to
    it (m Tm / (n Tn)). None, with the reason, where the row or its base did not succeed or has no time, where the base
    is no valid measurement, or where they did not do the same work with the same means: strong scaling needs equal
    global batches, weak scaling equal batches of a rank, and on a CPU a rank must have as many threads.
    """
    for row in rows:
        base = _base(row, rows)
        reason = _no_efficiency(row, base, scaling)
        row["efficiency"] = row["efficiency_base_ranks"] = None
        row["efficiency_reason"] = reason
        if reason is not None:
            continue
        ranks, least = _ranks(row), _ranks(base)
        row["efficiency_base_ranks"] = least
        if scaling == "strong":
            row["efficiency"] = least * _time(base) / (ranks * _time(row))
        else:
            row["efficiency"] = (_rate(row) / ranks) / (_rate(base) / least)


def _no_efficiency(row: Mapping[str, Any], base: Mapping[str, Any], scaling: str) -> str | None:
    """Why the times of a row and of its base do not make an efficiency; None where they do."""
    least = f"{_ranks(base)} rank{'' if _ranks(base) == 1 else 's'}"
    for of, name in ((row, "the cell"), (base, f"the cell on {least}, the base,")):
        if of["status"] != "success":
            return f"{name} was not run" if of["status"] is None else f"{name} ended as {of['status']}"
        if not _time(of) or (scaling == "weak" and not _rate(of)):
            return f"{name} has no time"
    if row is not base and base.get("performance_valid") is False:
        return f"the cell on {least}, the base, is no valid measurement"
    own, other = _batch(row, scaling), _batch(base, scaling)
    if own is not None and other is not None and own != other:
        what = "global batch" if scaling == "strong" else "batch of a rank"
        return f"the {what} is {own:g}, but {other:g} in the cell on {least}, the base"
    own, other = _threads(row), _threads(base)
    if own is not None and other is not None and own != other:
        return f"a rank has {own} threads, but {other} in the cell on {least}, the base; set OMP_NUM_THREADS for both"
    return None


def _threads(row: Mapping[str, Any]) -> int | None:
    """Threads of a rank where they do the work, on a CPU; None where that is not so, or not known."""
    figures = row["figures"]
    return figures.get("torch_threads") if figures.get("device") == "cpu" else None


def _batch(row: Mapping[str, Any], scaling: str) -> float | None:
    """Samples of a step that `scaling` keeps equal; None where the row does not say."""
    whole = row["figures"].get("global_batch_size")
    if whole is None:
        return None
    return float(whole) if scaling == "strong" else float(whole) / _ranks(row)


def _base(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The cell with the fewest ranks among those that differ from `row` in nothing else."""
    own = group_of(row["labels"], "nproc")
    return min((other for other in rows if group_of(other["labels"], "nproc") == own), key=_ranks)


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
    of rank 0 by cell. ``error_steps`` counts the steps that both have and in which the loss of both is finite;
    ``loss_nonfinite_steps`` and ``grad_norm_nonfinite_steps`` those in which one of the two is not. Where there is such
    a step the error is None: no number tells how far a training that diverged is off.
    """
    for row in rows:
        reference = next((other for other in rows if _is_reference(other, row, against)), None)
        lines = metrics.get(row["id"], ())
        others = {line["global_step"]: line for line in metrics.get(reference["id"], ())} if reference else {}
        row["reference"] = None if reference is None else reference["id"]
        pairs = [(line, others[line["global_step"]]) for line in lines if line["global_step"] in others]
        row["error_steps"] = sum(_finite(a.get("loss")) and _finite(b.get("loss")) for a, b in pairs)
        for name in ("loss", "grad_norm"):
            bad = sum(_not_finite(a, name) or _not_finite(b, name) for a, b in pairs)
            row[f"{name}_nonfinite_steps"] = bad
            known = [(a[name], b[name]) for a, b in pairs if _finite(a.get(name)) and b.get(name)]
            row[f"{name}_error"] = None if bad else _deviation(known)


def _finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _not_finite(line: Mapping[str, Any], name: str) -> bool:
    """Whether a figure is there and is not finite. JSON has null for it with a mark beside.

    A step without loss is one; a norm in a step that loss scaling skipped is none: that is how it finds its scale.
    """
    if line.get(name) is None:
        return name == "loss" or (bool(line.get(f"{name}_nonfinite")) and not line.get("skipped"))
    return not _finite(line[name])


def _is_reference(other: Mapping[str, Any], row: Mapping[str, Any], against: Mapping[str, Any]) -> bool:
    fits = all(other["labels"][name] == value for name, value in against.items())
    return fits and group_of(other["labels"], *against) == group_of(row["labels"], *against)


def _deviation(pairs: Sequence[tuple[float, float]]) -> float | None:
    return max((abs(a - b) / abs(b) for a, b in pairs), default=None)


def largest_that_fits(rows: Sequence[Mapping[str, Any]], axis: str) -> list[dict[str, Any]]:
    """For each group of rows that differ in `axis` alone: the largest value that succeeded, and the first that did not.

    The file's list goes from small to large. ``first_that_does_not`` is None where all that were tried fit: the largest
    is then at least that. ``failed`` names values that ended otherwise, by status: whether they fit is not known.
    """
    order = in_file_order([row["labels"] for row in rows], axis)
    out = []
    for group in dict.fromkeys(group_of(row["labels"], axis) for row in rows):
        members = [row for row in rows if group_of(row["labels"], axis) == group]
        members.sort(key=lambda row: order.index(row["labels"][axis]))
        fits = [row["labels"][axis] for row in members if row["status"] == "success"]
        fails = [row["labels"][axis] for row in members if row["status"] == "oom"]
        others = [row for row in members if row["status"] not in ("success", "oom", None)]
        out.append(
            {
                "labels": {k: v for k, v in members[0]["labels"].items() if k != axis},
                "axis": axis,
                "largest": fits[-1] if fits else None,
                "first_that_does_not": fails[0] if fails else None,
                "failed": {str(row["labels"][axis]): row["status"] for row in others},
            }
        )
    return out
