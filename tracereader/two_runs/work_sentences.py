"""Sentences on changes of the GPU work between two runs' steps."""

from collections.abc import Sequence

from tracereader.trace.kernel_names import labels
from tracereader.two_runs.changed_work import Named, changed_work
from tracereader.two_runs.side import Side

NAMES_SHOWN, FEW = 15, 6
WIDEST = 60  # letters of a kernel's name


def in_lists(first: Side, other: Side) -> tuple[list[str], list[str]]:
    """Return sentences on the changes, and on what stayed the same."""
    found, changed = changed_work(first, other), []
    for one in found.replaced:
        shown = _labels(one.before, one.after)
        changed.append(f"{one.calls:,} x {one.op}: {_counted(one.before, shown)} → {_counted(one.after, shown)}")
    shown = _labels(found.gone, found.new)
    for what, some in (("gone", found.gone), ("new", found.new)):
        changed += [f"GPU work {what}: {_counted(some, shown)}"] if some else []
    return changed, _same(found.kept, first)


def _same(kept: Sequence[Named], side: Side) -> list[str]:
    shown = _labels(kept)
    gemms, others = [], []
    for one in kept:
        (gemms if side.says[one.name].family == "GEMM" else others).append(one)
    clauses = []
    if gemms:
        count = sum(one.count for one in gemms)
        clauses.append(f"{count} of the GEMMs, by kernel name: {_listed(gemms, shown, NAMES_SHOWN)}")
    return clauses + ([_listed(others, shown, FEW)] if others else [])


def _labels(*some: Sequence[Named]) -> dict[str, str]:
    return labels([one.name for each in some for one in each], WIDEST)


def _counted(some: Sequence[Named], shown: dict[str, str]) -> str:
    """Return the names with their counts and times, the costliest first. shown: the printed form of each name."""
    costliest = sorted(some, key=lambda one: -one.us)
    clauses = [f"{one.count} x {shown[one.name]} ({_time(one)} µs)" for one in costliest[:NAMES_SHOWN]]
    return ", ".join(clauses) + and_more(len(costliest), NAMES_SHOWN)


def _listed(some: Sequence[Named], shown: dict[str, str], most: int) -> str:
    return ", ".join(f"{one.count} x {shown[one.name]}" for one in some[:most]) + and_more(len(some), most)


def _time(one: Named) -> str:
    """Return the time of all activities of a name. The text gives their number if only some of them are meant."""
    return ("" if one.count == one.total else f"of {one.total:,} in ") + f"{one.us:,.1f}"


def and_more(count: int, shown: int) -> str:
    return f" and {count - shown:,} more" if count > shown else ""
