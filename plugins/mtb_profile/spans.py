"""Sets of time: disjoint intervals in whole nanoseconds, and the arithmetic on them. Exact; no rounding anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Bools = NDArray[np.bool_]


@attrs.frozen(eq=False)
class Spans:
    """Disjoint, sorted, non-touching intervals ``[start, end)`` in ns; make them by `union`."""

    starts: Int64
    ends: Int64

    @property
    def total(self) -> int:
        """Length of them all, ns."""
        return int((self.ends - self.starts).sum())

    def __and__(self, other: Spans) -> Spans:
        """What both cover."""
        return _combine(self, other, np.logical_and)

    def __or__(self, other: Spans) -> Spans:
        """What either covers."""
        return union(np.concatenate([self.starts, other.starts]), np.concatenate([self.ends, other.ends]))

    def __sub__(self, other: Spans) -> Spans:
        """What this covers and the other does not."""
        return _combine(self, other, lambda a, b: a & ~b)

    def contains(self, times: Int64) -> Bools:
        """Whether each of `times` lies in one of the intervals."""
        if not len(self.starts):
            return np.zeros(len(times), dtype=bool)
        index = np.searchsorted(self.starts, times, side="right") - 1
        return np.asarray((index >= 0) & (times < self.ends[index]), dtype=bool)

    def before(self, times: Int64) -> Int64:
        """For each of `times`, how much of this set lies before it, ns."""
        if not len(self.starts):
            return np.zeros(len(times), dtype=np.int64)
        lengths = self.ends - self.starts
        done = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        index = np.searchsorted(self.starts, times, side="right")
        last = np.maximum(index - 1, 0)
        part = np.minimum(times - self.starts[last], lengths[last])
        return np.where(index > 0, done[last] + part, 0)

    def within(self, starts: Int64, ends: Int64) -> Int64:
        """For each interval from `starts` to `ends`, how much of it this set covers, ns."""
        return self.before(ends) - self.before(starts)


def union(starts: Sequence[int] | Int64, ends: Sequence[int] | Int64) -> Spans:
    """The set that the given intervals cover; those of no length cover nothing."""
    s, e = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
    real = e > s
    s, e = s[real], e[real]
    if not len(s):
        return EMPTY
    order = np.argsort(s, kind="stable")
    s, e = s[order], np.maximum.accumulate(e[order])
    new = np.concatenate([np.ones(1, dtype=bool), s[1:] > e[:-1]])
    return Spans(s[new], e[np.concatenate([new[1:], np.ones(1, dtype=bool)])])


def _combine(a: Spans, b: Spans, wanted: Callable[[Bools, Bools], Any]) -> Spans:
    edges = np.unique(np.concatenate([a.starts, a.ends, b.starts, b.ends]))
    if len(edges) < 2:
        return EMPTY
    starts, ends = edges[:-1], edges[1:]
    keep = np.asarray(wanted(a.contains(starts), b.contains(starts)), dtype=bool)
    return union(starts[keep], ends[keep])


EMPTY = Spans(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
