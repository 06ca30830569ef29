"""Unions and differences of intervals of whole nanoseconds: busy time is a union, never a sum."""

from collections.abc import Iterable
from itertools import pairwise

Intervals = list[tuple[int, int]]  # disjoint, in order


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """What at least one of them covers."""
    merged: Intervals = []
    start = end = None
    for one_start, one_end in sorted(intervals):
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
    """What the first covers and the second does not."""
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
    return sum(end - start for start, end in intervals)


def clipped(intervals: Iterable[tuple[int, int]], start: int, end: int) -> Iterable[tuple[int, int]]:
    """Those that reach into the window, cut to it."""
    for one_start, one_end in intervals:
        if one_start < end and one_end > start:
            yield max(one_start, start), min(one_end, end)


def gaps(covered: Intervals, start: int, end: int) -> Intervals:
    """What lies between the covered intervals of a window."""
    edges = [start, *(edge for one in covered for edge in one), end]
    return [(left, right) for left, right in list(pairwise(edges))[::2] if right > left]
