"""How likely chance alone would show as much: for a rank that was slower in so many steps, by so much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

#: Median absolute deviation to standard deviation, of normal values.
_NORMAL_MAD = 1.4826


def sign_test(differences: Sequence[float]) -> float:
    """Probability of at least so many positive ones if either sign were equally likely (one-sided sign test)."""
    n, positive = len(differences), sum(d > 0 for d in differences)
    return sum(math.comb(n, k) for k in range(positive, n + 1)) / 2.0**n


def t_test(differences: Sequence[float]) -> float:
    """Probability of at least so large a mean if that of all steps were 0 (one-sided t-test, for normal values).

    1.0 for fewer than two values. Values that are all the same prove their sign.
    """
    if len(differences) < 2:
        return 1.0
    mean, spread = fmean(differences), stdev(differences)
    if spread == 0:
        return 0.0 if mean > 0 else 1.0
    return _student_above(mean / spread * math.sqrt(len(differences)), len(differences) - 1)


def robust_spread(values: Sequence[float]) -> float:
    """Standard deviation, estimated from the median absolute deviation: single outliers do not count."""
    middle = median(values)
    return _NORMAL_MAD * median(abs(v - middle) for v in values)


def _student_above(t: float, degrees: int) -> float:
    """P(T > t) of Student's t with whole degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    squared = math.cos(angle) ** 2
    term, total = 1.0, 0.0
    if degrees % 2:
        for k in range(1, degrees, 2):
            total += term
            term *= squared * (k + 1) / (k + 2)
        within = 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    else:
        for k in range(1, degrees, 2):
            total += term
            term *= squared * k / (k + 1)
        within = math.sin(angle) * total
    return max(0.0, (1 - within) / 2)
