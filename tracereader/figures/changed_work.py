"""Changes of the GPU work between two runs' steps: by kernel name, and in one line by what the kernels do."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tracereader.figures.side import Side, what
from tracereader.trace.kernel_names import KernelName, decode, labels, short

NAMES_SHOWN, FEW = 15, 6
WIDEST = 60  # letters of a kernel's name
LONGER_THAN_ANY = 10_000
# Of a step's GPU time. Less is not what sets a run apart: of 15 programs run twice on the H200 by the same kernels, no
# part's time differed by 4% of the step.
MUCH_OF_A_STEP = 0.1
# Hand-written kernels (Liger's) that do these ops in one, and do not name them.
FUSED_BY_HAND = (("geglu", ("gelu", "mul")), ("swiglu", ("silu", "mul")))


@dataclass(frozen=True)
class _Compared:
    """The GPU work of two steps by name, with how often. gone, new: what is neither relaunched nor another instance.

    relaunched: names that as many calls of the same ops launch, more or less often.
    instances: of one name as shown, what stood for it before and after; equally often.
    """

    kept: Counter
    gone: Counter
    new: Counter
    relaunched: list[str]
    instances: list[tuple[Counter, Counter]]


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
            instances.append((_taken(gone, before, count), _taken(new, after, count)))
    relaunched.sort(key=lambda name: -other.times[name])
    instances.sort(key=lambda pair: -_pieces(other, pair[1]).us)
    return _Compared(kept, gone, new, relaunched, instances)


def _replaced(first: Side, other: Side, gone: Counter, new: Counter) -> list[tuple[str, Counter, Counter]]:
    """For ops that both runs call equally often: what each launches in the first run and in the second.

    Both are taken out of `gone` and `new`. The op whose work took longest comes first.
    """
    found = []
    for op, mine in first.work_of.items():
        theirs = other.work_of.get(op)
        if not theirs or first.ops[op] != other.ops[op]:
            continue  # with another number of calls, some of it may be replaced by nothing
        before, after = (mine - theirs) & gone, (theirs - mine) & new
        if before and after:
            gone -= before
            new -= after
            found.append((op, before, after))
    return sorted(found, key=lambda one: -max(_share(first, one[1]), _share(other, one[2])))


def _share(side: Side, names: Counter) -> float:
    """GPU time (µs) of the given number of activities of each name."""
    return sum(side.times[name] * count / side.work[name] for name, count in names.items())


def _parts_of(side: Side, names: Counter) -> Counter:
    """The same activities grouped by what they do."""
    found = Counter()
    for name, count in names.items():
        found[side.parts[name]] += count
    return found


def _taken(counts: Counter, names: Sequence[str], count: int) -> Counter:
    """At most `count` activities of these names, which are removed from `counts`."""
    found = Counter()
    for name in names:
        found[name] = min(counts[name], count - found.total())
    counts -= found
    return +found


def in_lists(first: Side, other: Side) -> tuple[list[str], list[str]]:
    """What changed and what stayed the same, by kernel name."""
    changed, same = [], []
    found = _compared(first, other)
    gone, new = found.gone, found.new
    for before, after in _renamed_epilogues(gone, new, first.says | other.says):
        count = min(gone[before], new[after])
        gone[before] -= count
        new[after] -= count
        changed.append(
            f"{short(before)} becomes {short(after)}: same tile and layout, "
            f"epilogue {decode(before).parts.get('epilogue', 'none')} → {decode(after).parts.get('epilogue', 'none')}"
        )
    gone, new = +gone, +new
    if merged := _merged(first, other, gone, new):
        before, after = merged
        parts = " + ".join(f"{what(name)} {first.times[name]:,.1f}" for name in before)
        times = f", {new[after]:,} times" if new[after] > 1 else ""
        changed.append(
            f"{parts} µs → one kernel{times}, {short(after, WIDEST)} {other.times[after]:,.1f} µs: the "
            "intermediate results no longer go through memory"
        )
        for name in before:
            del gone[name]
        del new[after]
    changed += [_instances(first, other, *pair) for pair in found.instances]
    changed += [f"{_relaunched(first, other, name)}: {short(name, WIDEST)}" for name in found.relaunched]
    for op, before, after in _replaced(first, other, gone, new):
        shown = labels([*before, *after], WIDEST)
        changed.append(f"{first.ops[op]:,} x {op}: {_counted(before, shown, first)} → {_counted(after, shown, other)}")
    shown = labels([*gone, *new], WIDEST)
    if gone:
        changed.append("GPU work gone: " + _counted(gone, shown, first))
    if new:
        changed.append("GPU work new: " + _counted(new, shown, other))
    shown = labels(found.kept, WIDEST)
    gemms = Counter({name: n for name, n in found.kept.items() if first.says[name].family == "GEMM"})
    if gemms:
        same.append(f"{gemms.total()} of the GEMMs, by kernel name: {_counted(gemms, shown)}")
    if others := found.kept - gemms:
        same.append(_counted(others, shown, most=FEW))
    return changed, same


def _instances(first: Side, other: Side, before: Counter, after: Counter) -> str:
    """softmax_warp_forward<bf16, fp32>: another instance of its template, for rows of another length."""
    count, was, is_now = before.total(), _pieces(first, before), _pieces(other, after)
    old, new = (decode(next(iter(names))).parts for names in (before, after))
    differ = [f", {part} {old[part]} → {new[part]}" for part in old if old[part] != new.get(part, old[part])]
    return (
        f"{count:,} x {short(next(iter(before)), WIDEST)}: another instance of its template{''.join(differ)} "
        f"({was.time(count)} → {is_now.time(count)} µs)"
    )


def _relaunched(first: Side, other: Side, name: str) -> str:
    asking = " + ".join(f"{calls:,} x {op}" for op, calls in first.asked_by[name].items())
    (before, us_before), (after, us_after) = ((side.work[name], side.times[name]) for side in (first, other))
    launches = "launch" if after == 1 else "launches"
    return f"{asking} in {after:,} {launches} instead of {before:,} ({us_before:,.1f} → {us_after:,.1f} µs)"


def _renamed_epilogues(gone: Counter, new: Counter, known: dict[str, KernelName]) -> Iterator[tuple[str, str]]:
    """Pairs of GEMM kernels whose names differ only in the epilogue. Each kernel is in at most one pair."""

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


def _merged(first: Side, other: Side, gone: Counter, new: Counter) -> tuple[list[str], str] | None:
    """The pointwise kernels that one new kernel replaces, by the ops that it does: each as often as it runs."""
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
    return (replaced, after) if len(replaced) > 1 else None


def _fuses(name: str) -> Sequence[str]:
    """The ops in a fused kernel's name."""
    said = decode(name).parts.get("fuses", "")
    if said:
        return said.removeprefix("fuses ").split(", ")
    return next((ops for word, ops in FUSED_BY_HAND if word in name), ())


def _counted(names: Counter, shown: dict[str, str], side: Side | None = None, most: int = NAMES_SHOWN) -> str:
    """The names with their counts, those that cost most first. shown: each as it is written."""
    costliest = sorted(names.items(), key=lambda item: -side.times[item[0]] if side else 0)
    told = [
        f"{count} x {shown[name]}" + (f" ({_of(count, side.work[name])}{side.times[name]:,.1f} µs)" if side else "")
        for name, count in costliest[:most]
    ]
    return ", ".join(told) + and_more(len(names), most)


def _of(count: int, total: int) -> str:
    """Times are those of all activities of a name; the text says so where only some of them are meant."""
    return "" if count == total else f"of {total:,} in "


def and_more(count: int, shown: int) -> str:
    return f" and {count - shown:,} more" if count > shown else ""


@dataclass(frozen=True)
class _Pieces:
    """The GPU activities of one step that do the same work. total, us: of all activities of the same names."""

    count: int = 0
    total: int = 0
    us: float = 0.0
    makers: str = ""

    def time(self, count: int) -> str:
        return f"{_of(count, self.total)}{self.us:,.1f}"

    def share(self, count: int) -> float:
        return self.us * count / self.total if count else 0.0


def _pieces(side: Side, names: Counter) -> _Pieces:
    makers = dict.fromkeys(decode(name).maker.partition(",")[0] for name in names)
    total, us = sum(side.work[name] for name in names), sum(side.times[name] for name in names)
    return _Pieces(names.total(), total, us, " and ".join(makers))


def _by_part(side: Side, names: Counter) -> dict[str, _Pieces]:
    found = defaultdict(Counter)
    for name, count in names.items():
        found[side.parts[name]][name] = count
    return {part: _pieces(side, some) for part, some in found.items()}


def in_short(first: Side, other: Side) -> tuple[list[str], bool]:
    """What changed by what the kernels do, the longest first; and whether any of it is gone or new."""
    found = _compared(first, other)
    told: dict[str, list[tuple[float, str]]] = defaultdict(list)  # by how it changed: how much GPU time that is
    left_gone, left_new, told_of = Counter(found.gone), Counter(found.new), set()
    for op, before, after in _replaced(first, other, Counter(found.gone), Counter(found.new)):
        old, now = _parts_of(first, before), _parts_of(other, after)
        if old == now:
            continue  # listed part by part
        left_gone -= before
        left_new -= after
        told_of |= {*old, *now}
        us = [_share(side, names) for side, names in ((first, before), (other, after))]
        did, does = (
            " + ".join(f"{count:,} x {part}" for part, count in some.most_common(FEW)) + and_more(len(some), FEW)
            for some in (old, now)
        )
        text = f"{first.ops[op]:,} x {op} ({did} {us[0]:,.1f} → {does} {us[1]:,.1f} µs)"
        told["other kernels for "].append((max(us), text))
    gone, new = _by_part(first, left_gone), _by_part(other, left_new)
    for part in {**gone, **new}:
        before, after = gone.get(part, _Pieces()), new.get(part, _Pieces())
        if both := min(before.count, after.count):
            old, now = (f"{before.makers} ", f"{after.makers} ") if before.makers != after.makers else ("", "")
            times = f"{old}{before.time(both)} → {now}{after.time(both)} µs"
            how = "another kind of " if part in ("memcpy", "memset") else "other kernels for "
            told[how].append((max(before.share(both), after.share(both)), f"{both:,} x {part} ({times})"))
        for how, some in (("gone: ", before), ("new: ", after)):
            if left := some.count - both:
                told[how].append((some.share(left), f"{left:,} x {part} ({some.time(left)} µs)"))
    for before, after in found.instances:
        part, count = next(iter(_parts_of(first, before))), before.total()
        told_of.add(part)
        times = f"{_pieces(first, before).time(count)} → {_pieces(other, after).time(count)} µs"
        told["other instances of a template for "].append((_share(other, after), f"{count:,} x {part} ({times})"))
    for name in found.relaunched:
        told[""].append((max(first.times[name], other.times[name]), _relaunched(first, other, name)))
    if told:
        told["other times for "] = _other_times(
            first, other, {*gone, *new, *told_of, *(first.parts[one] for one in found.relaunched)}
        )
    texts = []
    for how, some in sorted(told.items(), key=lambda item: -sum(us for us, _ in item[1])):
        shown = [text for _, text in sorted(some, key=lambda one: -one[0])[:FEW]]
        texts += [f"{how}{', '.join(shown)}{and_more(len(some), FEW)}"] if some else []
    return texts, "gone: " in told or "new: " in told


def _other_times(first: Side, other: Side, told: set[str]) -> list[tuple[float, str]]:
    """Work that both steps do equally often and whose time explains much of the difference between them."""
    before, after = (_by_part(side, side.work) for side in (first, other))
    much = MUCH_OF_A_STEP * max(first.summary.summed_us, other.summary.summed_us)
    return [
        (max(old.us, new.us), f"{old.count:,} x {part} ({old.us:,.1f} → {new.us:,.1f} µs)")
        for part, old in before.items()
        if part not in told and (new := after.get(part)) and abs(new.us - old.us) > much
    ]
