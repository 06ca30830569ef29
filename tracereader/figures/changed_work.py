"""Changes of the GPU work between two runs' steps, by kernel name."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from tracereader.figures.side import Side
from tracereader.trace.kernel_names import KernelName, decode, short

LONGER_THAN_ANY = 10_000
# Hand-written kernels (Liger's) that fuse these ops without naming them.
FUSED_BY_HAND = (("geglu", ("gelu", "mul")), ("swiglu", ("silu", "mul")))


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

    @property
    def own_us(self) -> float:
        """Return the time (µs) of the counted activities: the mean of each name times its count."""
        return sum(one.us * one.count / one.total for one in self.by_name)


class Pair(msgspec.Struct, frozen=True):
    """Activities of one step and the activities of the other step that correspond to them."""

    before: Activities
    after: Activities


class Relaunched(msgspec.Struct, frozen=True):
    """A name that equally many calls of the same ops launch more or less often. calls: of these ops."""

    calls: dict[str, int]
    before: Named
    after: Named


class Replaced(msgspec.Struct, frozen=True):
    """The work that equally many calls of an op launch in one run, and in another."""

    op: str
    calls: int
    before: Activities
    after: Activities


class Merged(msgspec.Struct, frozen=True):
    """Pointwise kernels, and the one kernel of another run that replaces them. ops: the ops that each computes."""

    before: tuple[Named, ...]
    ops: tuple[str, ...]
    after: Named


class ChangedNames(msgspec.Struct, frozen=True):
    """The GPU work of two steps, by name. gone, new: work that belongs to none of the other fields.

    renamed: GEMM kernels whose names differ only in the epilogue. instances: instances of one template, equally many.
    """

    kept: Activities
    renamed: tuple[tuple[str, str], ...]
    merged: Merged | None
    instances: tuple[Pair, ...]
    relaunched: tuple[Relaunched, ...]
    replaced: tuple[Replaced, ...]
    gone: Activities
    new: Activities


def _taken(counts: Counter, names: Sequence[str], count: int) -> Counter:
    """Return at most `count` activities of these names, after removing them from `counts`."""
    found = Counter()
    for name in names:
        found[name] = min(counts[name], count - found.total())
    counts -= found
    return +found


def _activities(side: Side, names: Counter) -> Activities:
    return Activities(tuple(_named(side, name, count) for name, count in names.items()))


def _named(side: Side, name: str, count: int) -> Named:
    return Named(name, count, side.work[name], side.times[name])


def _replaced(first: Side, other: Side, gone: Counter, new: Counter) -> list[Replaced]:
    """Return the work of each op that both runs call equally often, in the first run and in the second.

    Both are taken out of `gone` and `new`. The op whose work took longest comes first.
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
            found.append(Replaced(op, first.ops[op], _activities(first, before), _activities(other, after)))
    return sorted(found, key=lambda one: -max(one.before.own_us, one.after.own_us))


def by_name(first: Side, other: Side) -> ChangedNames:
    """Return the changed and the unchanged work, by kernel name."""
    relaunched = [
        name
        for name, times in first.work.items()
        if other.work[name] not in (0, times) and first.asked_by.get(name) == other.asked_by.get(name) is not None
    ]
    kept, gone, new = first.work & other.work, first.work - other.work, other.work - first.work
    for name in relaunched:
        del kept[name]
        gone.pop(name, None)
        new.pop(name, None)
    instances = _instances(first, other, gone, new)
    renamed = []
    for before, after in _renamed_epilogues(gone, new, first.says | other.says):
        count = min(gone[before], new[after])
        gone[before] -= count
        new[after] -= count
        renamed.append((before, after))
    gone, new = +gone, +new
    if merged := _merged(first, other, gone, new):
        for one in merged.before:
            del gone[one.name]
        del new[merged.after.name]
    replaced = _replaced(first, other, gone, new)
    return ChangedNames(
        kept=_activities(first, kept),
        renamed=tuple(renamed),
        merged=merged,
        instances=tuple(sorted(instances, key=lambda pair: -pair.after.us)),
        relaunched=tuple(
            Relaunched(first.asked_by[name], *(_named(side, name, side.work[name]) for side in (first, other)))
            for name in sorted(relaunched, key=lambda name: -other.times[name])
        ),
        replaced=tuple(replaced),
        gone=_activities(first, gone),
        new=_activities(other, new),
    )


def _instances(first: Side, other: Side, gone: Counter, new: Counter) -> list[Pair]:
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
            pair = _taken(gone, before, count), _taken(new, after, count)
            found.append(Pair(_activities(first, pair[0]), _activities(other, pair[1])))
    return found


def _renamed_epilogues(gone: Counter, new: Counter, known: dict[str, KernelName]) -> Iterator[tuple[str, str]]:
    """Yield pairs of GEMM kernels whose names differ only in the epilogue. Each kernel is in at most one pair."""

    def but_the_epilogue(name: str) -> tuple | None:
        says = known[name]
        if says.family != "GEMM" or "tile" not in says.parts:
            return None
        return says.maker, *sorted(part for part in says.parts.items() if part[0] != "epilogue")

    successors: dict[tuple, list[str]] = {}
    for name in new:
        if key := but_the_epilogue(name):
            successors.setdefault(key, []).append(name)
    for before in gone:
        alike = successors.get(but_the_epilogue(before), [])
        epilogue = decode(before).parts.get("epilogue")
        after = next((name for name in alike if decode(name).parts.get("epilogue") != epilogue), None)
        if after:
            alike.remove(after)
            yield before, after


def _merged(first: Side, other: Side, gone: Counter, new: Counter) -> Merged | None:
    """Return the pointwise kernels that one new kernel replaces, by its ops: each runs as often as it does."""
    candidates = [name for name in new if other.says[name].family == "pointwise"]
    if len(candidates) != 1:
        return None
    (after,) = candidates
    does = _fuses(after)
    replaced = [
        name
        for name in dict.fromkeys(one.name for one in first.summary.gpu_work)
        if gone[name] == first.work[name] == new[after]
        and first.says[name].family == "pointwise"
        and _does(name) in does
    ]
    if len(replaced) < 2:
        return None
    before = tuple(_named(first, name, gone[name]) for name in replaced)
    return Merged(before, tuple(map(_does, replaced)), _named(other, after, new[after]))


def _does(name: str) -> str:
    """Return a pointwise kernel's operation in a word, if its name gives it."""
    return decode(name).parts.get("does") or short(name)


def _fuses(name: str) -> Sequence[str]:
    """Return the ops in a fused kernel's name."""
    said = decode(name).parts.get("fuses", "")
    if said:
        return said.removeprefix("fuses ").split(", ")
    return next((ops for word, ops in FUSED_BY_HAND if word in name), ())
