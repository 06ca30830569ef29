"""Changes of the GPU work between two runs' steps, in words: by kernel name, and in one line by what they do."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from tracereader.figures import changed_work
from tracereader.figures.changed_work import Activities, Merged, Named, Pair, Relaunched, Replaced
from tracereader.figures.side import Side
from tracereader.trace.kernel_names import decode, labels, short

NAMES_SHOWN, FEW = 15, 6
WIDEST = 60  # letters of a kernel's name


def in_lists(first: Side, other: Side) -> tuple[list[str], list[str]]:
    """What changed and what stayed the same, by kernel name."""
    found = changed_work.by_name(first, other)
    changed = [_renamed(*pair) for pair in found.renamed]
    changed += [_merged(found.merged)] if found.merged else []
    changed += [_instances(pair) for pair in found.instances]
    changed += [f"{_relaunched(one)}: {short(one.after.name, WIDEST)}" for one in found.relaunched]
    changed += [_replaced(one) for one in found.replaced]
    shown = _labels(found.gone, found.new)
    for what, some in (("gone", found.gone), ("new", found.new)):
        changed += [f"GPU work {what}: {_counted(some, shown)}"] if some.by_name else []
    return changed, _same(found.kept, first)


def _same(kept: Activities, side: Side) -> list[str]:
    shown = _labels(kept)
    gemms, others = [], []
    for one in kept.by_name:
        (gemms if side.says[one.name].family == "GEMM" else others).append(one)
    told = []
    if gemms:
        count = sum(one.count for one in gemms)
        told.append(f"{count} of the GEMMs, by kernel name: {_listed(gemms, shown, NAMES_SHOWN)}")
    return told + ([_listed(others, shown, FEW)] if others else [])


def _renamed(before: str, after: str) -> str:
    was, now = (decode(name).parts.get("epilogue", "none") for name in (before, after))
    return f"{short(before)} becomes {short(after)}: same tile and layout, epilogue {was} → {now}"


def _merged(one: Merged) -> str:
    parts = " + ".join(f"{op} {each.us:,.1f}" for op, each in zip(one.ops, one.before, strict=True))
    times = f", {one.after.count:,} times" if one.after.count > 1 else ""
    return (
        f"{parts} µs → one kernel{times}, {short(one.after.name, WIDEST)} {one.after.us:,.1f} µs: the "
        "intermediate results no longer go through memory"
    )


def _instances(pair: Pair) -> str:
    """softmax_warp_forward<bf16, fp32>: another instance of its template, for rows of another length."""
    first, other = (some.by_name[0].name for some in (pair.before, pair.after))
    old, new = decode(first).parts, decode(other).parts
    differ = [f", {part} {old[part]} → {new[part]}" for part in old if old[part] != new.get(part, old[part])]
    return (
        f"{pair.before.count:,} x {short(first, WIDEST)}: another instance of its template{''.join(differ)} "
        f"({_times(pair)})"
    )


def _relaunched(one: Relaunched) -> str:
    asking = " + ".join(f"{calls:,} x {op}" for op, calls in one.calls.items())
    launches = "launch" if one.after.count == 1 else "launches"
    times = f"{one.before.us:,.1f} → {one.after.us:,.1f} µs"
    return f"{asking} in {one.after.count:,} {launches} instead of {one.before.count:,} ({times})"


def _replaced(one: Replaced) -> str:
    shown = _labels(one.before, one.after)
    return f"{one.calls:,} x {one.op}: {_counted(one.before, shown)} → {_counted(one.after, shown)}"


def _labels(*some: Activities) -> dict[str, str]:
    return labels([one.name for each in some for one in each.by_name], WIDEST)


def _counted(some: Activities, shown: dict[str, str]) -> str:
    """The names with their counts and times, those that cost most first. shown: each as it is written."""
    costliest = sorted(some.by_name, key=lambda one: -one.us)
    told = [f"{one.count} x {shown[one.name]} ({_time(one, one.count)} µs)" for one in costliest[:NAMES_SHOWN]]
    return ", ".join(told) + and_more(len(costliest), NAMES_SHOWN)


def _listed(some: Sequence[Named], shown: dict[str, str], most: int) -> str:
    return ", ".join(f"{one.count} x {shown[one.name]}" for one in some[:most]) + and_more(len(some), most)


def _time(some: Activities | Named, count: int) -> str:
    """A time is that of all activities of a name; the text says so where only `count` of them are meant."""
    return ("" if count == some.total else f"of {some.total:,} in ") + f"{some.us:,.1f}"


def _times(pair: Pair) -> str:
    count = pair.before.count
    return f"{_time(pair.before, count)} → {_time(pair.after, count)} µs"


def and_more(count: int, shown: int) -> str:
    return f" and {count - shown:,} more" if count > shown else ""


def in_short(first: Side, other: Side) -> tuple[list[str], bool]:
    """What changed by what the kernels do, the longest first; and whether any of it is gone or new."""
    found = changed_work.by_part(first, other)
    told: dict[str, list[tuple[float, str]]] = defaultdict(list)  # by how it changed: how much GPU time that is
    for one in found.replaced:
        us = one.before.own_us, one.after.own_us
        did, does = (_parts(some.parts) for some in (one.before, one.after))
        text = f"{one.calls:,} x {one.op} ({did} {us[0]:,.1f} → {does} {us[1]:,.1f} µs)"
        told["other kernels for "].append((max(us), text))
    for pair in found.of_other_names:
        for how, us, text in _of_other_names(pair):
            told[how].append((us, text))
    for pair in found.instances:
        text = f"{pair.before.count:,} x {pair.before.by_name[0].part} ({_times(pair)})"
        told["other instances of a template for "].append((pair.after.own_us, text))
    for one in found.relaunched:
        told[""].append((max(one.before.us, one.after.us), _relaunched(one)))
    for pair in found.other_times:
        us = pair.before.us, pair.after.us
        text = f"{pair.before.count:,} x {pair.before.by_name[0].part} ({us[0]:,.1f} → {us[1]:,.1f} µs)"
        told["other times for "].append((max(us), text))
    texts = []
    for how, some in sorted(told.items(), key=lambda item: -sum(us for us, _ in item[1])):
        shown = [text for _, text in sorted(some, key=lambda one: -one[0])[:FEW]]
        texts.append(f"{how}{', '.join(shown)}{and_more(len(some), FEW)}")
    return texts, "gone: " in told or "new: " in told


def _parts(counts: Counter) -> str:
    return " + ".join(f"{count:,} x {part}" for part, count in counts.most_common(FEW)) + and_more(len(counts), FEW)


def _of_other_names(pair: Pair) -> list[tuple[str, float, str]]:
    """How what some activities do changed, for how much GPU time (µs), and the figures: by other kernels, gone, new."""
    before, after = pair.before, pair.after
    part = (before.by_name or after.by_name)[0].part
    both = min(before.count, after.count)
    told = []
    if both:
        makers = [" and ".join(some.makers) for some in (before, after)]
        old, now = (f"{maker} " if makers[0] != makers[1] else "" for maker in makers)
        how = "another kind of " if part in ("memcpy", "memset") else "other kernels for "
        text = f"{both:,} x {part} ({old}{_time(before, both)} → {now}{_time(after, both)} µs)"
        told.append((how, max(_share(before, both), _share(after, both)), text))
    for how, some in (("gone: ", before), ("new: ", after)):
        if left := some.count - both:
            told.append((how, _share(some, left), f"{left:,} x {part} ({_time(some, left)} µs)"))
    return told


def _share(some: Activities, count: int) -> float:
    """The time (µs) of so many of the activities of these names."""
    return some.us * count / some.total
