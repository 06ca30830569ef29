"""Sentences on the differences between two runs' typical steps, and on what stayed the same."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from tracereader.trace.kernel_names import labels
from tracereader.trace.labels import COMPILE_ROWS
from tracereader.trace.processes import some_of
from tracereader.two_runs import compare
from tracereader.two_runs.changed_work import Named, changed_work
from tracereader.two_runs.side import Side

OPS_SHOWN, NAMES_SHOWN, FEW = 40, 15, 6
WIDEST = 60  # letters of a kernel's name
HASH_SHOWN = 12  # of 52 letters
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
    work_changed, work_same = (["only one of the two has GPU work"], []) if alone else _work(first, other)
    ops_changed, ops_same = _ops(first, other)
    flags_changed = filter(None, [flags(first, other)])
    return Difference(*map(tuple, (flags_changed, work_changed, ops_changed, work_same, ops_same)))


def flags(first: Side, other: Side) -> str:
    """Return the flags of numbered scripts that two runs both have and that differ, as one text; "" without any."""
    before, after = (side.summary.source.facts.flags for side in (first, other))
    told = {name: tuple(_flag(name, one[name]) for one in (before, after)) for name in before if name in after}
    texts = [f"{was} → {now}" for was, now in told.values() if was != now]
    return "flags: " + "; ".join(texts) if texts else ""


def _flag(name: str, value: object) -> str:
    typed = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return f"without {typed}"
    return typed if value is True else f"{typed} {value}"


def _work(first: Side, other: Side) -> tuple[list[str], list[str]]:
    """Return sentences on the changes of the GPU work, and on what stayed the same."""
    found, changed = changed_work(first, other), []
    for one in found.replaced:
        shown = _short_names(one.before, one.after)
        changed.append(f"{one.calls:,} x {one.op}: {_with_times(one.before, shown)} → {_with_times(one.after, shown)}")
    shown = _short_names(found.gone, found.new)
    for what, some in (("gone", found.gone), ("new", found.new)):
        changed += [f"GPU work {what}: {_with_times(some, shown)}"] if some else []
    return changed, _kept(found.kept, first)


def _kept(kept: Sequence[Named], side: Side) -> list[str]:
    shown = _short_names(kept)
    gemms, others = [], []
    for one in kept:
        (gemms if side.says[one.name].family == "GEMM" else others).append(one)
    clauses = []
    if gemms:
        count = sum(one.count for one in gemms)
        clauses.append(f"{count} of the GEMMs, by kernel name: {_without_times(gemms, shown, NAMES_SHOWN)}")
    return clauses + ([_without_times(others, shown, FEW)] if others else [])


def _short_names(*some: Sequence[Named]) -> dict[str, str]:
    return labels([one.name for each in some for one in each], WIDEST)


def _with_times(some: Sequence[Named], shown: dict[str, str]) -> str:
    """Return the names with their counts and times, the costliest first. shown: the printed form of each name."""
    costliest = sorted(some, key=lambda one: -one.us)
    return some_of([f"{one.count} x {shown[one.name]} ({_time(one)} µs)" for one in costliest], NAMES_SHOWN)


def _without_times(some: Sequence[Named], shown: dict[str, str], most: int) -> str:
    return some_of([f"{one.count} x {shown[one.name]}" for one in some], most)


def _time(one: Named) -> str:
    """Return the time of all activities of a name. The text gives their number if only some of them are meant."""
    return ("" if one.count == one.total else f"of {one.total:,} in ") + f"{one.us:,.1f}"


def _ops(first: Side, other: Side) -> tuple[list[str], list[str]]:
    """Return sentences on the ops that only one of two steps calls, and on those that both call equally often."""
    kept, new = sorted(first.ops.keys() & other.ops.keys()), sorted(other.ops.keys() - first.ops.keys())
    counts = {name: (first.ops[name], other.ops[name]) for name in kept}
    lists = {
        "ops gone": sorted(first.ops.keys() - other.ops.keys()),
        "torch.compile's rows before the ops": [name for name in new if name in COMPILE_ROWS],
        # A kernel's name is no op.
        "ops new": [name for name in new if name not in COMPILE_ROWS and name not in other.work],
        "calls": [f"{name} {was:,} → {now:,}" for name, (was, now) in counts.items() if was != now],
    }
    changed = [f"{what}: {some_of(names, OPS_SHOWN)}" for what, names in lists.items() if names]
    changed += _inputs(first, other) + _graphs(first, other)
    same = [name for name, (was, now) in counts.items() if was == now]
    return changed, ["ops: " + some_of(same, FEW)] if same else []


def _inputs(first: Side, other: Side) -> list[str]:
    """Return a sentence on the tensors that only one run has, for ops called equally often, the costliest op first."""
    texts, times = [], other.summary.cpu.ops
    for name in sorted(times, key=lambda name: -times[name].self_us):
        before, after = (Counter(side.summary.cpu.inputs.get(name)) for side in (first, other))
        if before and after and before != after and before.total() == after.total():
            gone, new = ([one for one, _ in some.most_common()] for some in (before - after, after - before))
            texts.append(f"{name} {some_of(gone, 1)}, then {some_of(new, 1)}")
    rest = f" and {len(texts) - INPUTS_SHOWN:,} more ops" * (len(texts) > INPUTS_SHOWN)
    return [f"inputs: {'; '.join(texts[:INPUTS_SHOWN])}{rest}"] if texts else []


def _graphs(first: Side, other: Side) -> list[str]:
    """Return a sentence on other hashes of graphs, without a reason: torch's version and settings are part of them."""
    found = first.graphs, other.graphs
    if not all(found) or found[0] == found[1]:
        return []
    before, after = (some_of([f"{one[:HASH_SHOWN]}…" for one in graphs], FEW) for graphs in found)
    has = "graphs have other hashes" if max(map(len, found)) > 1 else "graph has another hash"
    return [f"the compiled {has}: {before}, then {after}"]


def setup(side: Side) -> str:
    """Return the GPU activities of one run's step as text, counted by operation."""
    return some_of([f"{count} x {part}" for part, count in side.parts.most_common()], NAMES_SHOWN) or "no GPU work"
