"""How likely chance alone would show as much: for a rank that was slower in so many steps, by so much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

from mtb_core import student_cdf

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
    return student_cdf(-mean / spread * math.sqrt(len(differences)), len(differences) - 1)


def robust_spread(values: Sequence[float]) -> float:
    """Standard deviation, estimated from the median absolute deviation: single outliers do not count."""
    middle = median(values)
    return _NORMAL_MAD * median(abs(v - middle) for v in values)
