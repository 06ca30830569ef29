"""Sentences on changes of the GPU work between two runs' steps, by kernel name and by operation."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from tracereader.trace.kernel_names import decode, labels, short
from tracereader.two_runs import changed_work
from tracereader.two_runs.changed_work import Activities, Merged, Named, Pair, Relaunched
from tracereader.two_runs.side import Side

NAMES_SHOWN, FEW = 15, 6
WIDEST = 60  # letters of a kernel's name


def in_lists(first: Side, other: Side) -> tuple[list[str], list[str]]:
    """Return sentences on the changes, and on what stayed the same, by kernel name."""
    found = changed_work.by_name(first, other)
    changed = [_renamed(*pair) for pair in found.renamed]
    changed += [_merged(found.merged)] if found.merged else []
    changed += [_instances(pair) for pair in found.instances]
    changed += [f"{_relaunched(one)}: {short(one.after.name, WIDEST)}" for one in found.relaunched]
    for one in found.replaced:
        shown = _labels(one.before, one.after)
        changed.append(f"{one.calls:,} x {one.op}: {_counted(one.before, shown)} → {_counted(one.after, shown)}")
    shown = _labels(found.gone, found.new)
    for what, some in (("gone", found.gone), ("new", found.new)):
        changed += [f"GPU work {what}: {_counted(some, shown)}"] if some.by_name else []
    return changed, _same(found.kept, first)


def _same(kept: Activities, side: Side) -> list[str]:
    shown = _labels(kept)
    gemms, others = [], []
    for one in kept.by_name:
        (gemms if side.says[one.name].family == "GEMM" else others).append(one)
    clauses = []
    if gemms:
        count = sum(one.count for one in gemms)
        clauses.append(f"{count} of the GEMMs, by kernel name: {_listed(gemms, shown, NAMES_SHOWN)}")
    return clauses + ([_listed(others, shown, FEW)] if others else [])


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
    """Return a sentence on another instance of a kernel's template, for example for rows of another length."""
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


def _labels(*some: Activities) -> dict[str, str]:
    return labels([one.name for each in some for one in each.by_name], WIDEST)


def _counted(some: Activities, shown: dict[str, str]) -> str:
    """Return the names with their counts and times, the costliest first. shown: the printed form of each name."""
    costliest = sorted(some.by_name, key=lambda one: -one.us)
    clauses = [f"{one.count} x {shown[one.name]} ({_time(one, one.count)} µs)" for one in costliest[:NAMES_SHOWN]]
    return ", ".join(clauses) + and_more(len(costliest), NAMES_SHOWN)


def _listed(some: Sequence[Named], shown: dict[str, str], most: int) -> str:
    return ", ".join(f"{one.count} x {shown[one.name]}" for one in some[:most]) + and_more(len(some), most)


def _time(some: Activities | Named, count: int) -> str:
    """Return the time of all activities of a name. The text gives their number if only `count` of them are meant."""
    return ("" if count == some.total else f"of {some.total:,} in ") + f"{some.us:,.1f}"


def _times(pair: Pair) -> str:
    count = pair.before.count
    return f"{_time(pair.before, count)} → {_time(pair.after, count)} µs"


def and_more(count: int, shown: int) -> str:
    return f" and {count - shown:,} more" if count > shown else ""


def in_short(first: Side, other: Side) -> tuple[list[str], bool]:
    """Return clauses on the changes by operation, the longest first, and whether any activity is gone or new."""
    found = changed_work.by_part(first, other)
    clauses: dict[str, list[tuple[float, str]]] = defaultdict(list)  # by kind of change, with its GPU time
    for one in found.replaced:
        us = one.before.own_us, one.after.own_us
        did, does = (_parts(some.parts) for some in (one.before, one.after))
        text = f"{one.calls:,} x {one.op} ({did} {us[0]:,.1f} → {does} {us[1]:,.1f} µs)"
        clauses["other kernels for "].append((max(us), text))
    for pair in found.of_other_names:
        for how, us, text in _of_other_names(pair):
            clauses[how].append((us, text))
    for pair in found.instances:
        text = f"{pair.before.count:,} x {pair.before.by_name[0].part} ({_times(pair)})"
        clauses["other instances of a template for "].append((pair.after.own_us, text))
    for one in found.relaunched:
        clauses[""].append((max(one.before.us, one.after.us), _relaunched(one)))
    for pair in found.other_times:
        us = pair.before.us, pair.after.us
        text = f"{pair.before.count:,} x {pair.before.by_name[0].part} ({us[0]:,.1f} → {us[1]:,.1f} µs)"
        clauses["other times for "].append((max(us), text))
    texts = []
    for how, some in sorted(clauses.items(), key=lambda item: -sum(us for us, _ in item[1])):
        shown = [text for _, text in sorted(some, key=lambda one: -one[0])[:FEW]]
        texts.append(f"{how}{', '.join(shown)}{and_more(len(some), FEW)}")
    return texts, "gone: " in clauses or "new: " in clauses


def _parts(counts: Counter) -> str:
    return " + ".join(f"{count:,} x {part}" for part, count in counts.most_common(FEW)) + and_more(len(counts), FEW)


def _of_other_names(pair: Pair) -> list[tuple[str, float, str]]:
    """Return the kind of each change (other kernels, gone or new), its GPU time (µs), and its text."""
    before, after = pair.before, pair.after
    part = (before.by_name or after.by_name)[0].part
    both = min(before.count, after.count)
    clauses = []
    if both:
        makers = [" and ".join(some.makers) for some in (before, after)]
        old, now = (f"{maker} " if makers[0] != makers[1] else "" for maker in makers)
        how = "another kind of " if part in ("memcpy", "memset") else "other kernels for "
        text = f"{both:,} x {part} ({old}{_time(before, both)} → {now}{_time(after, both)} µs)"
        clauses.append((how, max(_share(before, both), _share(after, both)), text))
    for how, some in (("gone: ", before), ("new: ", after)):
        if left := some.count - both:
            clauses.append((how, _share(some, left), f"{left:,} x {part} ({_time(some, left)} µs)"))
    return clauses


def _share(some: Activities, count: int) -> float:
    """Return the time (µs) of `count` of the activities of these names."""
    return some.us * count / some.total
