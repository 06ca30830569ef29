"""Sentences on the differences between two runs' typical steps, and on what stayed the same."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from tracereader.figures import changed_work, compare
from tracereader.figures.changed_work import Activities, Named, WorkChange
from tracereader.figures.side import Side
from tracereader.trace.kernel_names import decode, labels, short

OPS_SHOWN, NAMES_SHOWN, FEW = 40, 15, 6
WIDEST = 60  # letters of a kernel's name
HASH_SHOWN = 12  # of 52 letters
ONE_ALONE = "only one of the two has GPU work"
INPUTS_SHOWN = 2  # ops, because one changed type or size shows in the inputs of many ops


class Difference(msgspec.Struct, frozen=True):
    """A comparison of two runs: flags, GPU work and ops, each as lists of sentences."""

    flags_changed: tuple[str, ...]
    work_changed: tuple[str, ...]
    ops_changed: tuple[str, ...]
    work_same: tuple[str, ...]
    ops_same: tuple[str, ...]

    @property
    def changed(self) -> tuple[str, ...]:
        return self.flags_changed + self.work_changed + self.ops_changed

    @property
    def same(self) -> tuple[str, ...]:
        return self.work_same + self.ops_same


def difference(first: Side, other: Side) -> Difference:
    """Return the differences between two runs, and what stayed the same."""
    alone = compare.only_one_has_gpu_work(first, other)
    work_changed, work_same = ([ONE_ALONE], []) if alone else _work(first, other)
    ops_changed, ops_same = _ops(first, other)
    text = flags(first, other)
    flags_changed = [text] if text else []
    return Difference(*map(tuple, (flags_changed, work_changed, ops_changed, work_same, ops_same)))


def _work(first: Side, other: Side) -> tuple[list[str], list[str]]:
    """Return sentences on the changes of the GPU work, and on what stayed the same, by kernel name."""
    found = changed_work.by_name(first, other)
    changed = [_changed(one) for one in found.changes]
    shown = _labels(found.gone, found.new)
    for what, some in (("gone", found.gone), ("new", found.new)):
        changed += [f"GPU work {what}: {_counted(some, shown)}"] if some.by_name else []
    return changed, _same(found.kept, first)


def _changed(one: WorkChange) -> str:
    """Return a sentence on activities that do the same in another way."""
    before, after = one.before, one.after
    asking = " + ".join(f"{calls:,} x {op}" for op, calls in one.calls.items())
    if one.how == "replaced":
        shown = _labels(before, after)
        return f"{asking}: {_counted(before, shown)} → {_counted(after, shown)}"
    first, other = (some.by_name[0].name for some in (before, after))
    times = f"({_time(before, before.count)} → {_time(after, after.count)} µs)"
    if one.how == "relaunched":
        launches = "launch" if after.count == 1 else "launches"
        return f"{asking} in {after.count:,} {launches} instead of {before.count:,} {times}: {short(other, WIDEST)}"
    old, new = decode(first).parts, decode(other).parts
    differ = [f", {part} {old[part]} → {new[part]}" for part in old if old[part] != new.get(part, old[part])]
    return f"{before.count:,} x {short(first, WIDEST)}: another instance of its template{''.join(differ)} {times}"


def _same(kept: Activities, side: Side) -> list[str]:
    shown = _labels(kept)
    gemms, others = [], []
    for one in kept.by_name:
        (gemms if side.says[one.name].family == "GEMM" else others).append(f"{one.count} x {shown[one.name]}")
    count = sum(one.count for one in kept.by_name if side.says[one.name].family == "GEMM")
    clauses = [f"{count} of the GEMMs, by kernel name: {_listed(gemms, NAMES_SHOWN)}"] if gemms else []
    return clauses + ([_listed(others, FEW)] if others else [])


def _labels(*some: Activities) -> dict[str, str]:
    return labels([one.name for each in some for one in each.by_name], WIDEST)


def _counted(some: Activities, shown: dict[str, str]) -> str:
    """Return the names with their counts and times, the costliest first. shown: the printed form of each name."""
    costliest = sorted(some.by_name, key=lambda one: -one.us)
    clauses = [f"{one.count} x {shown[one.name]} ({_time(one, one.count)} µs)" for one in costliest]
    return _listed(clauses, NAMES_SHOWN)


def _time(some: Activities | Named, count: int) -> str:
    """Return the time of all activities of a name. The text gives their number if only `count` of them are meant."""
    return ("" if count == some.total else f"of {some.total:,} in ") + f"{some.us:,.1f}"


def _and_more(count: int, shown: int) -> str:
    return f" and {count - shown:,} more" if count > shown else ""


def flags(first: Side, other: Side) -> str:
    """Return the flags in which two runs of numbered scripts differ, as one text; "" without any."""
    texts = [f"{_flag(one.name, one.before)} → {_flag(one.name, one.after)}" for one in compare.flags(first, other)]
    return "flags: " + "; ".join(texts) if texts else ""


def _flag(name: str, value: object) -> str:
    typed = f"--{name.replace('_', '-')}"
    return {None: f"without {typed}", True: typed}.get(value, f"{typed} {value}")


def _ops(first: Side, other: Side) -> tuple[list[str], list[str]]:
    found = compare.ops(first, other)
    calls = [f"{name} {before:,} → {after:,}" for name, (before, after) in found.calls.items()]
    lists = {"ops gone": found.gone, "torch.compile's rows before the ops": found.rows_new}
    lists |= {"ops new": found.new, "calls": calls}
    changed = [f"{what}: {_listed(names)}" for what, names in lists.items() if names]
    changed += _inputs(first, other) + _graphs(first, other)
    return changed, ["ops: " + _listed(found.same, FEW)] if found.same else []


def _inputs(first: Side, other: Side) -> list[str]:
    found = compare.inputs(first, other)
    texts = [f"{one.op} {_listed(one.before, 1)}, then {_listed(one.after, 1)}" for one in found[:INPUTS_SHOWN]]
    rest = _and_more(len(found), INPUTS_SHOWN).replace(" more", " more ops")
    return [f"inputs: {'; '.join(texts)}{rest}"] if texts else []


def _graphs(first: Side, other: Side) -> list[str]:
    """Return a sentence on other hashes of graphs, without a reason: torch's version and settings are part of them."""
    found = compare.graphs(first, other)
    if found is None:
        return []
    before, after = (_listed([f"{one[:HASH_SHOWN]}…" for one in graphs], FEW) for graphs in found)
    has = "graphs have other hashes" if max(map(len, found)) > 1 else "graph has another hash"
    return [f"the compiled {has}: {before}, then {after}"]


def _listed(names: Sequence[str], shown: int = OPS_SHOWN) -> str:
    return ", ".join(names[:shown]) + _and_more(len(names), shown)


def setup(side: Side) -> str:
    """Return the GPU activities of one run's step as text, counted by family."""
    parts = Counter(one.family for one in side.summary.gpu_work)
    return ", ".join(f"{count} x {part}" for part, count in parts.most_common()) or "no GPU work"
