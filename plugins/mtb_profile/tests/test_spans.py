"""Interval arithmetic, held against sets of single nanoseconds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mtb_profile.spans import EMPTY, union

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


def spans(pairs):
    return union([a for a, _ in pairs], [a + n for a, n in pairs])


def points(pairs):
    return {t for a, n in pairs for t in range(a, a + n)}


def covered(found):
    return {t for a, b in zip(found.starts.tolist(), found.ends.tolist(), strict=True) for t in range(a, b)}


@given(INTERVALS, INTERVALS)
def test_set_algebra(a, b):
    """Union, intersection and difference hold exactly the nanoseconds that sets of nanoseconds hold."""
    x, y, p, q = spans(a), spans(b), points(a), points(b)
    assert covered(x) == p
    assert x.total == len(p)
    assert covered(x | y) == p | q
    assert covered(x & y) == p & q
    assert covered(x - y) == p - q


@given(INTERVALS, INTERVALS)
def test_normal_form(a, b):
    """Results are sorted, disjoint, not touching, and never of no length."""
    for found in (spans(a), spans(a) | spans(b), spans(a) & spans(b), spans(a) - spans(b)):
        assert (found.ends > found.starts).all()
        assert (found.starts[1:] > found.ends[:-1]).all()


@given(INTERVALS, st.lists(st.integers(-2, 60), min_size=1))
def test_measure_before_and_inside(a, times):
    """`before` and `contains` tell for each time what a set of nanoseconds tells."""
    found, p, t = spans(a), points(a), np.array(times)
    assert found.before(t).tolist() == [sum(x < time for x in p) for time in times]
    assert found.contains(t).tolist() == [time in p for time in times]


def test_epoch_nanoseconds_stay_exact():
    """Times near today's, 1.8e18 ns, lose nothing."""
    now = 1_790_857_026_123_456_789
    found = union([now, now + 5], [now + 7, now + 11]) - union([now + 2], [now + 3])
    assert found.total == 10
    assert (EMPTY | found).total == 10
