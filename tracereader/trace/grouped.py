"""Sorts what belongs together into lists, or adds it up."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")


def grouped(pairs: Iterable[tuple[Key, T]]) -> dict[Key, list[T]]:
    """Return the second members of the pairs by their first, both in their order. Asked for another key, it is []."""
    found: dict[Key, list[T]] = defaultdict(list)
    for key, one in pairs:
        found[key].append(one)
    return found


def totals(pairs: Iterable[tuple[Key, float]]) -> Counter[Key]:
    """Return the sums of the second members of the pairs by their first, both in their order."""
    found: Counter[Key] = Counter()
    for key, one in pairs:
        found[key] += one
    return found
