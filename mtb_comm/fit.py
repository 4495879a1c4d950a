"""The latency-bandwidth model t(S) = alpha + S / beta, fitted to measured points. Pure.

Hockney's model ("The communication challenge for MPP", Parallel Computing 20, 1994). Times range over orders of
magnitude, and small ones have more relative noise. So the median of each size has the weight 1/t^1.5, between equal
absolute (1) and equal relative (1/t^2) errors. Alpha then comes from small sizes and beta from large ones, even if a
link lets short bursts through faster than its rate. Huber's weights, reweighted until they settle, keep single odd
sizes from bending the line. Source: Huber, "Robust Statistics", 1981; 1.345 and 1.4826 are his constants for normal
errors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from .definitions import bus_factor

CALIBRATION_SCHEMA = 1
SERIES = ("operation", "dtype", "reduction", "in_place", "split", "world_size")

_POWER = 1.5
_HUBER = 1.345
_MAD_TO_SIGMA = 1.4826
_ROUNDS = 50
#: A point that alone decides where the line goes would count as infinitely far off without itself.
_LEAST_FREE = 1e-3
#: Medians repeat to about this, relatively. Points so close to the line are never taken for odd, which with few points
#: (two of three always lie on a line) keeps the errors honest.
_NOISE = 0.05


@attrs.frozen
class Line:
    """A fitted t = `alpha_s` + S * `seconds_per_byte`, with the standard errors of both (None: as many unknowns as points).

    `rms` and `worst` are relative errors of the fit at the points, over all of them, outliers included.
    """

    alpha_s: float
    seconds_per_byte: float
    alpha_error_s: float | None
    seconds_per_byte_error: float | None
    rms: float
    worst: float


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line | None:
    """The line through (bytes, seconds); neither part is negative. None: fewer than two sizes, or time does not grow.

    All seconds must be more than 0.
    """
    if len(set(sizes)) < 2:
        return None
    factors = [1.0] * len(sizes)
    # What a relative residual weighs at each size, beside one of the longest time.
    shares = [(t / max(seconds)) ** (1 - _POWER / 2) for t in seconds]
    alpha = slope = 0.0
    for _ in range(_ROUNDS):
        former = (alpha, slope)
        alpha, slope = _solve(sizes, seconds, factors)
        residuals = [(alpha + slope * s - t) / t for s, t in zip(sizes, seconds, strict=True)]
        factors = _huber([r * share for r, share in zip(residuals, shares, strict=True)])
        if all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(former, (alpha, slope), strict=True)):
            break
    if slope <= 0:
        return None
    errors = _errors(sizes, seconds, factors, residuals)
    return Line(
        alpha, slope, *errors, math.sqrt(statistics.fmean(r * r for r in residuals)), max(abs(r) for r in residuals)
    )


def fit_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One fit for each series of measured rows (all but the size equal) with two or more sizes."""
    series: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["status"] == "ok" and row["size_bytes"]:
            series.setdefault(tuple(row[name] for name in SERIES), []).append(row)
    fits = (_fit_of(dict(zip(SERIES, key, strict=True)), members) for key, members in series.items())
    return [fit for fit in fits if fit is not None]


def calibration(document: Mapping[str, Any]) -> dict[str, Any]:
    """The calibration file of a communication document: what other programs need to predict times, and no more."""
    return {
        "schema_version": CALIBRATION_SCHEMA,
        "kind": "communication_calibration",
        "model": "time_s = alpha_s + size_bytes / (beta_gb_per_sec * 1e9)",
        **{key: document[key] for key in ("world_size", "groups", "backend", "device", "fits")},
        **{key: document[key] for key in ("performance_valid", "performance_invalid_reasons")},
        "environment": document["environment"],
        "provenance": document["provenance"],
    }


def _fit_of(series: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    line = fit_line([row["size_bytes"] for row in rows], [row["time_ms"]["p50"] / 1e3 for row in rows])
    if line is None:
        return None
    beta = 1 / line.seconds_per_byte / 1e9
    relative = None if line.seconds_per_byte_error is None else line.seconds_per_byte_error / line.seconds_per_byte
    # An uneven split loads its busiest rank by more than the factor of equal parts says.
    even = series["split"] != "uneven"
    return {
        **series,
        "points": len(rows),
        "size_bytes_min": min(row["size_bytes"] for row in rows),
        "size_bytes_max": max(row["size_bytes"] for row in rows),
        "alpha_s": line.alpha_s,
        "alpha_error_s": line.alpha_error_s,
        "beta_gb_per_sec": beta,
        "beta_error_gb_per_sec": None if relative is None else beta * relative,
        "beta_busbw_gb_per_sec": beta * bus_factor(series["operation"], series["world_size"]) if even else None,
        "relative_error_rms": line.rms,
        "relative_error_max": line.worst,
    }


def _weights(seconds: Sequence[float], factors: Sequence[float]) -> list[float]:
    return [f / t**_POWER for f, t in zip(factors, seconds, strict=True)]


def _solve(sizes: Sequence[float], seconds: Sequence[float], factors: Sequence[float]) -> tuple[float, float]:
    """Weighted least squares with neither part negative."""
    weights = _weights(seconds, factors)
    total = sum(weights)
    mean_s = sum(w * s for w, s in zip(weights, sizes, strict=True)) / total
    mean_t = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (s - mean_s) ** 2 for w, s in zip(weights, sizes, strict=True))
    slope = sum(w * (s - mean_s) * (t - mean_t) for w, s, t in zip(weights, sizes, seconds, strict=True)) / spread
    alpha = mean_t - slope * mean_s
    if alpha < 0:
        products = [w * s for w, s in zip(weights, sizes, strict=True)]
        slope = sum(p * t for p, t in zip(products, seconds, strict=True)) / sum(
            p * s for p, s in zip(products, sizes, strict=True)
        )
        return 0.0, slope
    return alpha, max(slope, 0.0)


def _huber(residuals: Sequence[float]) -> list[float]:
    scale = _MAD_TO_SIGMA * statistics.median(abs(r) for r in residuals)
    bound = _HUBER * max(scale, _NOISE)
    return [min(1.0, bound / abs(r)) if r else 1.0 for r in residuals]


def _errors(
    sizes: Sequence[float], seconds: Sequence[float], factors: Sequence[float], residuals: Sequence[float]
) -> tuple[float | None, float | None]:
    """Standard errors of alpha and slope, whatever the noise of each size is.

    The estimator HC3, close to a jackknife (MacKinnon and White, Journal of Econometrics 29, 1985): each residual counts
    as if its own point had been left out of the fit.
    """
    if len(sizes) < 3:
        return None, None
    weights = _weights(seconds, factors)
    total = sum(weights)
    mean_s = sum(w * s for w, s in zip(weights, sizes, strict=True)) / total
    spread = sum(w * (s - mean_s) ** 2 for w, s in zip(weights, sizes, strict=True))
    alpha = slope = 0.0
    for w, s, t, r in zip(weights, sizes, seconds, residuals, strict=True):
        leverage = w * (1 / total + (s - mean_s) ** 2 / spread)
        pull = w * r * t / max(1 - leverage, _LEAST_FREE)
        alpha += (pull * (1 / total - mean_s * (s - mean_s) / spread)) ** 2
        slope += (pull * (s - mean_s) / spread) ** 2
    return math.sqrt(alpha), math.sqrt(slope)
