"""Changes of the GPU work between two runs' steps, by kernel name."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec

from tracereader.figures.side import Side
from tracereader.trace.kernel_names import short

LONGER_THAN_ANY = 10_000


class Named(msgspec.Struct, frozen=True):
    """GPU activities of one name: `count` of the `total` that a step has. us: the time of all of them."""

    name: str
    count: int
    total: int
    us: float


class Activities(msgspec.Struct, frozen=True):
    """GPU activities of one step, by name."""

    by_name: tuple[Named, ...] = ()

    @property
    def count(self) -> int:
        return sum(one.count for one in self.by_name)

    @property
    def total(self) -> int:
        """Return the number of activities with these names in the step."""
        return sum(one.total for one in self.by_name)

    @property
    def us(self) -> float:
        """Return the time (µs) of all activities with these names in the step."""
        return sum(one.us for one in self.by_name)


class WorkChange(msgspec.Struct, frozen=True):
    """Activities of one step, and those of the other step that do the same.

    how: another instance of a kernel's template; one name that equally many calls launch more or less often
    (relaunched); or other kernels of equally many calls (replaced). calls: those calls by op; empty for an instance.
    """

    how: Literal["instance", "relaunched", "replaced"]
    calls: dict[str, int]
    before: Activities
    after: Activities


class ChangedNames(msgspec.Struct, frozen=True):
    """The GPU work of two steps, by name. gone, new: work that belongs to none of the changes."""

    kept: Activities
    changes: tuple[WorkChange, ...]
    gone: Activities
    new: Activities


def by_name(first: Side, other: Side) -> ChangedNames:
    """Return the changed and the unchanged work. Of each kind of change, the longest comes first."""
    kept, gone, new = first.work & other.work, first.work - other.work, other.work - first.work
    relaunched = []
    for name, times in first.work.items():
        calls = first.asked_by.get(name)
        if other.work[name] not in (0, times) and calls == other.asked_by.get(name) is not None:
            each = (_activities(side, Counter({name: side.work[name]})) for side in (first, other))
            relaunched.append(WorkChange("relaunched", calls, *each))
            del kept[name]
            gone.pop(name, None)
            new.pop(name, None)
    instances, replaced = _instances(first, other, gone, new), _replaced(first, other, gone, new)
    of_kinds = (
        sorted(some, key=lambda one: -max(one.before.us, one.after.us)) for some in (instances, relaunched, replaced)
    )
    return ChangedNames(
        kept=_activities(first, kept),
        changes=tuple(one for some in of_kinds for one in some),
        gone=_activities(first, gone),
        new=_activities(other, new),
    )


def _instances(first: Side, other: Side, gone: Counter, new: Counter) -> list[WorkChange]:
    """Return for each name as shown the equally many activities before and after.

    They are taken out of `gone` and `new`.
    """
    by_label: dict[str, tuple[list, list]] = defaultdict(lambda: ([], []))
    for which, names in enumerate((gone, new)):
        for name in names:
            by_label[short(name, LONGER_THAN_ANY)][which].append(name)
    found = []
    for before, after in by_label.values():
        if count := min(sum(gone[name] for name in before), sum(new[name] for name in after)):
            taken = _activities(first, _taken(gone, before, count)), _activities(other, _taken(new, after, count))
            found.append(WorkChange("instance", {}, *taken))
    return found


def _replaced(first: Side, other: Side, gone: Counter, new: Counter) -> list[WorkChange]:
    """Return the work of each op that both runs call equally often, in the first run and in the second.

    Both are taken out of `gone` and `new`.
    """
    found = []
    for op, mine in first.work_of.items():
        theirs = other.work_of.get(op)
        if not theirs or first.ops[op] != other.ops[op]:
            continue  # the other run may have dropped some calls and replaced nothing
        before, after = (mine - theirs) & gone, (theirs - mine) & new
        if before and after:
            gone -= before
            new -= after
            calls = {op: first.ops[op]}
            found.append(WorkChange("replaced", calls, _activities(first, before), _activities(other, after)))
    return found


def _taken(counts: Counter, names: Sequence[str], count: int) -> Counter:
    """Return at most `count` activities of these names, after removing them from `counts`."""
    found = Counter()
    for name in names:
        found[name] = min(counts[name], count - found.total())
    counts -= found
    return +found


def _activities(side: Side, names: Counter) -> Activities:
    return Activities(
        tuple(Named(name, count, side.work[name], side.times[name]) for name, count in names.items() if count)
    )
