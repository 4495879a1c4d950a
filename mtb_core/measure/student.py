"""Student's t distribution for any positive number of degrees of freedom. Pure functions.

By the regularised incomplete beta function and its continued fraction (Abramowitz and Stegun, "Handbook of
Mathematical Functions", 26.5.8 and 26.7.1; evaluated by Lentz's method).
"""

from __future__ import annotations

import functools
import math

_TINY = 1e-300


def student_cdf(t: float, degrees: float) -> float:
    """P(T <= t). A small one is exact, too: for P(T > t) ask for -t."""
    if t == 0.0:
        return 0.5
    tail = 0.5 * _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)
    return 1.0 - tail if t > 0 else tail


@functools.lru_cache(maxsize=256)
def student_quantile(p: float, degrees: float) -> float:
    """The t with P(T <= t) = `p`, by bisection.

    Raises:
        ValueError: `p` is not between 0 and 1, or `degrees` is not positive.
    """
    if not 0 < p < 1 or not degrees > 0:
        raise ValueError(f"student_quantile needs 0 < p < 1 and degrees > 0; got p = {p} and degrees = {degrees}")
    if p < 0.5:
        return -student_quantile(1 - p, degrees)
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if student_cdf(middle, degrees) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) for 0 <= x <= 1."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1.0 - front * _fraction(1 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1.0 / _away(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _away(1 + term * d)
            c = _away(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _away(x: float) -> float:
    return x if abs(x) > _TINY else _TINY
