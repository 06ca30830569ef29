"""Changes of the GPU work between two runs' steps, by kernel name."""

from collections import Counter
from collections.abc import Iterator

import msgspec

from tracereader.two_runs.side import Side


class Named(msgspec.Struct, frozen=True):
    """GPU activities of one name: `count` of the `total` that a step has. us: the time of all of them."""

    name: str
    count: int
    total: int
    us: float


class Replaced(msgspec.Struct, frozen=True):
    """The work that equally many calls of an op launch in one run, and in another."""

    op: str
    calls: int
    before: tuple[Named, ...]
    after: tuple[Named, ...]

    @property
    def us(self) -> float:
        """Return the time (µs) of the work in the run where it takes longer, by each name's mean time."""
        return max(sum(one.us * one.count / one.total for one in some) for some in (self.before, self.after))


class ChangedWork(msgspec.Struct, frozen=True):
    """The GPU work of two steps. gone, new: work that is not replaced."""

    kept: tuple[Named, ...]
    replaced: tuple[Replaced, ...]
    gone: tuple[Named, ...]
    new: tuple[Named, ...]


def changed_work(first: Side, other: Side) -> ChangedWork:
    """Return the changed and the unchanged work of two steps."""
    gone, new = first.work - other.work, other.work - first.work
    # The op whose work takes longest comes first.
    replaced = tuple(sorted(_replaced(first, other, gone, new), key=lambda one: -one.us))
    return ChangedWork(_named(first, first.work & other.work), replaced, _named(first, gone), _named(other, new))


def _named(side: Side, names: Counter) -> tuple[Named, ...]:
    return tuple(Named(name, count, side.work[name], side.times[name]) for name, count in names.items())


def _replaced(first: Side, other: Side, gone: Counter, new: Counter) -> Iterator[Replaced]:
    """Yield the work of each op that both runs call equally often, in the first run and in the second.

    Both are taken out of `gone` and `new`.
    """
    for op, mine in first.work_of.items():
        theirs = other.work_of.get(op)
        if not theirs or first.ops[op] != other.ops[op]:
            continue  # the other run may have dropped some calls and replaced nothing
        before, after = (mine - theirs) & gone, (theirs - mine) & new
        if before and after:
            gone -= before
            new -= after
            yield Replaced(op, first.ops[op], _named(first, before), _named(other, after))
