"""Summaries of repeated measurements. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

#: 0.975 quantile of Student's t for 1 to 9 degrees of freedom, where the series below is not accurate.
_T_975 = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)


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
    half = None if std is None else student_t_975(n - 1) * std / math.sqrt(n)
    return {
        "mean": mean,
        "std": std,
        "min": min(known),
        "max": max(known),
        "n": n,
        "ci95": None if half is None else [mean - half, mean + half],
    }


def student_t_975(degrees: int) -> float:
    """The 0.975 quantile of Student's t distribution, to five digits.

    Above 9 degrees of freedom by the expansion of Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.5.
    """
    if degrees < 1:
        msg = f"Student's t needs at least 1 degree of freedom, got {degrees}"
        raise ValueError(msg)
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    v = float(degrees)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


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
