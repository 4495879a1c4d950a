"""Summaries of repeated measurements. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from .student import student_quantile


def summarize(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Mean, sample standard deviation, minimum, maximum, number, and the 95% confidence interval of the mean.

    None among `values` means "not measured" and is left out; without any value the summary is None. ``ci95`` is
    ``[low, high]`` by Student's t for independent, roughly normal values. With one value, ``std`` and ``ci95`` are
    None. One value that is not finite makes all figures NaN, so that it cannot hide.
    """
    known = [float(v) for v in values if v is not None]
    if not known:
        return None
    n = len(known)
    if not all(map(math.isfinite, known)):
        nan = math.nan
        return {"mean": nan, "std": nan, "min": nan, "max": nan, "n": n, "ci95": None}
    mean = statistics.fmean(known)
    std = statistics.stdev(known, mean) if n > 1 else None
    half = None if std is None else student_quantile(0.975, n - 1) * std / math.sqrt(n)
    return {
        "mean": mean,
        "std": std,
        "min": min(known),
        "max": max(known),
        "n": n,
        "ci95": None if half is None else [mean - half, mean + half],
    }


def percentile(values: Sequence[float], q: float) -> float:
    """The `q`-th percentile, 0 to 100, linear between neighbours (as numpy does). Needs at least one value."""
    if not values or not 0 <= q <= 100:
        msg = f"percentile needs at least one value and 0 <= q <= 100; got {len(values)} values and q = {q}"
        raise ValueError(msg)
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
