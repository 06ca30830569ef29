"""Unions and differences of intervals of whole nanoseconds. Busy time is always a union of intervals."""

import bisect
from collections.abc import Iterable
from itertools import accumulate
from operator import itemgetter

Intervals = list[tuple[int, int]]  # disjoint, in order
_begin, _end = itemgetter(0), itemgetter(1)


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union of the intervals."""
    return joined(sorted(intervals))


def joined(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union of intervals that are in the order of their starts."""
    merged: Intervals = []
    start = end = None
    for one_start, one_end in intervals:
        if end is None or one_start > end:
            if end is not None:
                merged.append((start, end))
            start, end = one_start, one_end
        elif one_end > end:
            end = one_end
    if end is not None:
        merged.append((start, end))
    return merged


def minus(one: Intervals, other: Intervals) -> Intervals:
    """Return the first set of intervals without the second."""
    if not other:
        return list(one)
    left = []
    index = 0
    for start, end in one:
        while index < len(other) and other[index][1] <= start:
            index += 1
        at = index
        while at < len(other) and other[at][0] < end:
            if other[at][0] > start:
                left.append((start, other[at][0]))
            start = max(start, other[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Intervals) -> int:
    return sum([end - start for start, end in intervals])


def length_between(intervals: Intervals, start: int, end: int) -> int:
    """Return the length of the intervals between two times. Lengths answers many such questions faster."""
    first = bisect.bisect_right(intervals, start, key=_end)
    last = bisect.bisect_left(intervals, end, key=_begin)
    if first >= last:
        return 0
    before, after = max(0, start - intervals[first][0]), max(0, intervals[last - 1][1] - end)
    return length(intervals[first:last]) - before - after


def clipped(intervals: Iterable[tuple[int, int]], start: int, end: int) -> Iterable[tuple[int, int]]:
    """Yield the intervals that reach into the window, clipped to it."""
    for one_start, one_end in intervals:
        if one_start < end and one_end > start:
            yield max(one_start, start), min(one_end, end)


def both(one: Intervals, other: Intervals) -> Intervals:
    """Return the intersection of both."""
    return minus(one, minus(one, other))


class Lengths:
    """The covered length of any interval, given disjoint intervals. Each query takes two bisections."""

    def __init__(self, intervals: Intervals):
        self.starts = [start for start, _ in intervals]
        self.ends = [end for _, end in intervals]
        self.before = list(accumulate([end - start for start, end in intervals], initial=0))

    def between(self, start: int, end: int) -> int:
        return max(0, self.until(end) - self.until(start))

    def until(self, time: int) -> int:
        """Return the covered length before a time."""
        index = bisect.bisect_right(self.starts, time)
        if not index:
            return 0
        beyond = self.ends[index - 1] - time
        return self.before[index] - beyond if beyond > 0 else self.before[index]
