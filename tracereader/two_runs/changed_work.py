"""Changes of the GPU work between two runs' steps, by kernel name and by operation."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from tracereader.trace.kernel_names import KernelName, decode, short
from tracereader.two_runs.side import Side, what

LONGER_THAN_ANY = 10_000
# Share of a step's GPU time. A smaller change does not distinguish two runs: of 15 programs run twice on the H200 by
# the same kernels, no part's time differed by 4% of the step.
MUCH_OF_A_STEP = 0.1
# Hand-written kernels (Liger's) that fuse these ops without naming them.
FUSED_BY_HAND = (("geglu", ("gelu", "mul")), ("swiglu", ("silu", "mul")))


class Named(msgspec.Struct, frozen=True):
    """GPU activities of one name: `count` of the `total` that a step has. us: the time of all of them.

    part: a short description of their operation.
    """

    name: str
    part: str
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

    @property
    def makers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(decode(one.name).maker.partition(",")[0] for one in self.by_name))

    @property
    def parts(self) -> Counter:
        """Return the number of activities by operation."""
        found = Counter()
        for one in self.by_name:
            found[one.part] += one.count
        return found


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


class ChangedParts(msgspec.Struct, frozen=True):
    """Changes between the GPU work of two steps, by operation; the activities of a pair compute the same.

    of_other_names: work that only one of the steps has, by part, if other kernels of that part are in both lists.
    instances: instances of one template. other_times: work done equally often, in another time.
    """

    replaced: tuple[Replaced, ...]
    of_other_names: tuple[Pair, ...]
    instances: tuple[Pair, ...]
    relaunched: tuple[Relaunched, ...]
    other_times: tuple[Pair, ...]


class _Compared(msgspec.Struct):
    """The GPU work of two steps, counted by name. gone, new: work that is neither relaunched nor another instance.

    relaunched: names that equally many calls of the same ops launch more or less often. instances: for each name as
    shown, the equally many activities before and after.
    """

    kept: Counter
    gone: Counter
    new: Counter
    relaunched: list[str]
    instances: list[Pair]


def _compared(first: Side, other: Side) -> _Compared:
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
    by_label: dict[str, tuple[list, list]] = defaultdict(lambda: ([], []))
    for which, names in enumerate((gone, new)):
        for name in names:
            by_label[short(name, LONGER_THAN_ANY)][which].append(name)
    instances = []
    for before, after in by_label.values():
        if count := min(sum(gone[name] for name in before), sum(new[name] for name in after)):
            pair = _taken(gone, before, count), _taken(new, after, count)
            instances.append(Pair(_activities(first, pair[0]), _activities(other, pair[1])))
    relaunched.sort(key=lambda name: -other.times[name])
    instances.sort(key=lambda pair: -pair.after.us)
    return _Compared(kept, gone, new, relaunched, instances)


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
    return Named(name, side.parts[name], count, side.work[name], side.times[name])


def _relaunched(first: Side, other: Side, names: Sequence[str]) -> tuple[Relaunched, ...]:
    return tuple(
        Relaunched(first.asked_by[name], _named(first, name, first.work[name]), _named(other, name, other.work[name]))
        for name in names
    )


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
    found = _compared(first, other)
    gone, new = found.gone, found.new
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
        kept=_activities(first, found.kept),
        renamed=tuple(renamed),
        merged=merged,
        instances=tuple(found.instances),
        relaunched=_relaunched(first, other, found.relaunched),
        replaced=tuple(replaced),
        gone=_activities(first, gone),
        new=_activities(other, new),
    )


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
        and what(name) in does
    ]
    if len(replaced) < 2:
        return None
    before = tuple(_named(first, name, gone[name]) for name in replaced)
    return Merged(before, tuple(map(what, replaced)), _named(other, after, new[after]))


def _fuses(name: str) -> Sequence[str]:
    """Return the ops in a fused kernel's name."""
    said = decode(name).parts.get("fuses", "")
    if said:
        return said.removeprefix("fuses ").split(", ")
    return next((ops for word, ops in FUSED_BY_HAND if word in name), ())


def by_part(first: Side, other: Side) -> ChangedParts:
    """Return the changes by operation."""
    found = _compared(first, other)
    left_gone, left_new = found.gone, found.new
    replaced = []
    for one in _replaced(first, other, Counter(found.gone), Counter(found.new)):
        if one.before.parts == one.after.parts:
            continue  # the parts list these
        left_gone = left_gone - Counter({each.name: each.count for each in one.before.by_name})
        left_new = left_new - Counter({each.name: each.count for each in one.after.by_name})
        replaced.append(one)
    gone, new = _by_part(first, left_gone), _by_part(other, left_new)
    of_other_names = {part: Pair(gone.get(part, Activities()), new.get(part, Activities())) for part in {**gone, **new}}
    known = {*of_other_names, *(first.parts[name] for name in found.relaunched)}
    known.update(one.before.by_name[0].part for one in found.instances)
    known.update(part for one in replaced for part in (*one.before.parts, *one.after.parts))
    return ChangedParts(
        replaced=tuple(replaced),
        of_other_names=tuple(of_other_names.values()),
        instances=tuple(found.instances),
        relaunched=_relaunched(first, other, found.relaunched),
        other_times=tuple(_other_times(first, other, known)) if known else (),
    )


def _by_part(side: Side, names: Counter) -> dict[str, Activities]:
    found = defaultdict(Counter)
    for name, count in names.items():
        found[side.parts[name]][name] = count
    return {part: _activities(side, some) for part, some in found.items()}


def _other_times(first: Side, other: Side, known: set[str]) -> Iterator[Pair]:
    """Yield work that both steps do equally often and whose time explains much of the difference between them."""
    before, after = (_by_part(side, side.work) for side in (first, other))
    much = MUCH_OF_A_STEP * max(first.summary.summed_us, other.summary.summed_us)
    for part, old in before.items():
        if part not in known and part in after and abs(after[part].us - old.us) > much:
            yield Pair(old, after[part])
