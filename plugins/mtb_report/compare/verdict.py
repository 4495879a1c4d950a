"""Whether B is faster than A, from independent trials of both. Pure functions.

What is compared is the logarithm of a figure, so that the difference is a ratio. Paired trials (A B A B on one
machine) by the paired t test on the log-ratios; others by Welch's t test, which lets the spreads differ (B. L. Welch,
"The generalization of 'Student's' problem when several different population variances are involved", Biometrika 34,
1947; degrees of freedom by Welch and Satterthwaite).

The default confidence is 98%: of a hundred comparisons of a thing with itself about two end in a verdict, and with
noise that is skewed and drifts, as measured noise is, fewer than five. The steps of one run are not independent of
each other and never count as trials.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import attrs

from mtb_core import student_quantile

from .metrics import Metric

CONFIDENCE = 0.98
#: With which probability an effect of the size that is called "would be seen" leads to a verdict.
POWER = 0.8
_MOST_EXPONENT = 700.0
#: A standard error of logarithms that rounding alone makes.
_NO_SPREAD = 1e-12

NO_DIFFERENCE, UNDETERMINED = "no difference seen", "undetermined"


@attrs.frozen
class Comparison:
    """B against A.

    Attributes:
        ratio: how many times as fast as A B is, by the geometric means of the trials; above 1, B is faster. Of memory,
            how many times as much B takes. None where a side has no trial.
        low, high: its confidence interval; None where there is none.
        verdict: on B: `Metric.more` or `Metric.less`, "no difference seen" or "undetermined".
        n: trials of A and of B.
        method: the test, in words.
        seen_from: the smallest change, as a fraction, that this number of trials with this spread would show in 80%
            of such comparisons; None where it cannot be known.
        note: why it is undetermined, or what must be known to read it.
    """

    ratio: float | None
    low: float | None
    high: float | None
    verdict: str
    n: tuple[int, int]
    confidence: float
    method: str
    seen_from: float | None
    note: str | None = None


def compare_trials(
    a: Sequence[float],
    b: Sequence[float],
    *,
    paired: bool,
    metric: Metric,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Compare the trials `a` of A with those of B, `b`, of the figure `metric`, which is positive.

    Raises:
        ValueError: a figure that is not positive and finite, or pairs that are not complete.
    """
    for value in (*a, *b):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"a figure is {value}; only positive ones can be compared by their ratio")
    if paired and len(a) != len(b):
        raise ValueError(f"{len(a)} trials of A and {len(b)} of B are no pairs")
    method = "paired t test of log-ratios" if paired else "Welch's t test of logarithms, trials not paired"
    n = (len(a), len(b))
    if not a or not b:
        return Comparison(None, None, None, UNDETERMINED, n, confidence, method, None, "a side has no such figure")
    sign = -1.0 if metric.inverse else 1.0
    left, right = [sign * math.log(x) for x in a], [sign * math.log(x) for x in b]
    effect = statistics.fmean(right) - statistics.fmean(left)
    if min(n) < 2:
        reason = (
            "one trial of a side tells nothing of its spread, and the steps of one run are not independent of each "
            "other; use --repeat 3 or more, or compare --run"
        )
        return Comparison(_exp(effect), None, None, UNDETERMINED, n, confidence, method, None, reason)
    error, degrees = _paired(left, right) if paired else _welch(left, right)
    if error < _NO_SPREAD and metric.repeats_exactly:
        ratio = _exp(effect)
        reason = "the trials of a side are all equal, as memory may be: the interval has no width"
        return Comparison(ratio, ratio, ratio, _verdict(metric, effect, effect), n, confidence, method, None, reason)
    if error < _NO_SPREAD:
        reason = "the trials have no spread at all, which is not how measurements look: they may be copies of one measurement"
        return Comparison(_exp(effect), None, None, UNDETERMINED, n, confidence, method, None, reason)
    half = student_quantile((1 + confidence) / 2, degrees) * error
    low, high = effect - half, effect + half
    verdict = _verdict(metric, low, high)
    seen_from = _exp(half + student_quantile(POWER, degrees) * error) - 1
    copies = not paired and not metric.repeats_exactly
    equal = [name for name, side in (("A", a), ("B", b)) if copies and len(set(side)) == 1]
    note = f"all trials of {equal[0]} are equal, which is not how measurements look" if equal else None
    return Comparison(_exp(effect), _exp(low), _exp(high), verdict, n, confidence, method, seen_from, note)


def _verdict(metric: Metric, low: float, high: float) -> str:
    """Of an interval of the ratio's logarithm; one as narrow as rounding is 0 where it is next to 0."""
    return metric.more if low > _NO_SPREAD else metric.less if high < -_NO_SPREAD else NO_DIFFERENCE


def _exp(x: float) -> float:
    """e^x; the largest power that floats hold with ease where it is larger, as with two trials that are far apart."""
    return math.exp(min(x, _MOST_EXPONENT))


def _paired(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """(standard error, degrees of freedom) of the mean difference."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    return statistics.stdev(differences) / math.sqrt(len(differences)), len(differences) - 1


def _welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    parts = [statistics.variance(side) / len(side) for side in (a, b)]
    total = sum(parts)
    least = min(len(a), len(b)) - 1
    below = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True))
    return math.sqrt(total), max(total**2 / below, least) if below else least
