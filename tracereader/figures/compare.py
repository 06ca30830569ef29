"""What changed between two runs' typical steps, and what stayed the same."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tracereader.figures import Summary
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.steps import INDUCTORS_CALL
from tracereader.figures.summary import graphs_in
from tracereader.trace.kernel_names import decode, short

COMPILE_ROWS = ("TorchDynamo", "Torch-Compiled Region", "Pregraph", "AOTDispatcher", INDUCTORS_CALL)

NAMES_SHOWN, OPS_SHOWN, FEW = 15, 40, 6
HASH_SHOWN = 12  # letters of 52
INPUTS_SHOWN = 2  # ops: one type or size changed goes through them all
# Hand-written kernels (Liger's) that do these ops in one, and do not name them.
FUSED_BY_HAND = (("geglu", ("gelu", "mul")), ("swiglu", ("silu", "mul")))


@dataclass(frozen=True)
class Side:
    """One run's step, as compared."""

    summary: Summary

    @cached_property
    def name(self) -> str:
        """Script and tag of a numbered script's trace; else the file's name."""
        stem = Path(self.summary.trace).name.removesuffix(".gz").removesuffix(".json")
        return f"{self.summary.lesson['script']} {stem}" if self.summary.lesson else stem

    @cached_property
    def work(self) -> Counter:
        return Counter(one.name for one in self.summary.gpu_work)

    @cached_property
    def times(self) -> Counter:
        """GPU time by name of kernel, copy or memset."""
        times = Counter()
        for one in self.summary.gpu_work:
            times[one.name] += one.us
        return times

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that the run held at once, as its script stored it; else by the profiler's own events."""
        told = (self.summary.lesson or {}).get("facts", {}).get("peak_bytes")
        return told if type(told) is int and 0 < told < 2**53 else self.summary.peak_bytes

    @cached_property
    def ops(self) -> Counter:
        """Ops by name; of torch.compile's rows, no hash and no number."""
        counts = Counter()
        for name, op in self.summary.ops.items():
            counts[next((row for row in COMPILE_ROWS if name.startswith(row)), name)] += op.calls
        return counts

    @cached_property
    def graphs(self) -> list[str]:
        """The hashes of the compiled graphs that the step calls."""
        return graphs_in(call.name for call in self.summary.chain)


def told_apart(sides: Sequence[Side]) -> list[str]:
    """A name for each run: where names repeat with its device, and where that repeats with its folder."""
    names = [side.name for side in sides]
    devices = [", ".join(dict.fromkeys(side.summary.devices)) or "CPU" for side in sides]
    for more in (devices, [str(Path(side.summary.trace).parent) for side in sides]):
        times = Counter(names)
        if any(len({one for one, same in zip(more, names, strict=True) if same == name}) > 1 for name in times):
            names = [f"{name}, {one}" if times[name] > 1 else name for name, one in zip(names, more, strict=True)]
    return names


@dataclass(frozen=True)
class Difference:
    """One run against another: what was asked for, GPU work and ops, each as lists in words."""

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
    work_changed, work_same = _work(first, other)
    ops_changed, ops_same = _ops(first, other)
    flags_changed = _flags(first, other)
    return Difference(*map(tuple, (flags_changed, work_changed, ops_changed, work_same, ops_same)))


def _flags(first: Side, other: Side) -> list[str]:
    """The flags in which two runs of numbered scripts differ, of those that both have."""
    before, after = (
        {name: _value(flag) for name, flag in (side.summary.lesson or {}).get("flags", {}).items()}
        for side in (first, other)
    )
    told = [
        f"{name} {before[name]}, then {after[name]}" for name in before if after.get(name, before[name]) != before[name]
    ]
    return ["flags: " + "; ".join(told)] if told else []


def _value(flag: object) -> str:
    return "not given" if flag is None or flag is False else "given" if flag is True else str(flag)


def _work(first: Side, other: Side) -> tuple[list[str], list[str]]:
    changed, same = [], []
    kept, gone, new = first.work & other.work, first.work - other.work, other.work - first.work
    for before, after in _renamed_epilogues(gone, new):
        count = min(gone[before], new[after])
        gone[before] -= count
        new[after] -= count
        changed.append(
            f"{short(before)} becomes {short(after)}: same tile and layout, "
            f"epilogue {decode(before).parts.get('epilogue', 'none')} → {decode(after).parts.get('epilogue', 'none')}"
        )
    gone, new = +gone, +new
    if merged := _merged(first, gone, new):
        before, after = merged
        parts = " + ".join(f"{what(name)} {first.times[name]:.1f}" for name in before)
        times = f", {new[after]:,} times" if new[after] > 1 else ""
        changed.append(
            f"{parts} µs → one kernel{times}, {short(after, 60)} {other.times[after]:.1f} µs: what lay between "
            "them no longer goes through memory"
        )
        for name in before:
            del gone[name]
        del new[after]
    if gone:
        changed.append("GPU work gone: " + _counted(gone, first))
    if new:
        changed.append("GPU work new: " + _counted(new, other))
    gemms = Counter({name: n for name, n in kept.items() if decode(name).family == "GEMM"})
    if gemms:
        same.append(f"{gemms.total()} of the GEMMs, by kernel name: {_counted(gemms)}")
    if others := kept - gemms:
        same.append(_counted(others, shown=FEW))
    return changed, same


def _ops(first: Side, other: Side) -> tuple[list[str], list[str]]:
    changed = []
    gone, new = sorted(set(first.ops) - set(other.ops)), sorted(set(other.ops) - set(first.ops))
    if gone:
        changed.append("ops gone: " + _listed(gone))
    if rows := [name for name in new if name in COMPILE_ROWS]:
        changed.append(f"torch.compile's rows before the ops: {_listed(rows)}")
    if ops := [name for name in new if name not in COMPILE_ROWS and name not in other.work]:
        changed.append("ops new: " + _listed(ops))
    kept = sorted(set(first.ops) & set(other.ops))
    differ = [name for name in kept if first.ops[name] != other.ops[name]]
    if differ:
        calls = [f"{name} {first.ops[name]:,} → {other.ops[name]:,}" for name in differ]
        changed.append("calls: " + _listed(calls))
    changed += _inputs(first, other)
    changed += _graphs(first, other)
    same = [name for name in kept if name not in differ]
    return changed, ["ops: " + _listed(same, FEW)] if same else []


def _inputs(first: Side, other: Side) -> list[str]:
    """Of ops called as often in both runs, the tensors that only one of them has, the costliest op first."""
    found = []
    ops = other.summary.ops
    for name in sorted(ops, key=lambda name: -ops[name].self_us):
        before, after = (Counter(side.summary.inputs.get(name)) for side in (first, other))
        if before and after and before != after and before.total() == after.total():
            gone, new = (
                _listed([one for one, _ in some.most_common()], 1) for some in (before - after, after - before)
            )
            found.append(f"{name} {gone}, then {new}")
    more = _more(len(found), INPUTS_SHOWN).replace(" more", " more ops")
    return [f"inputs: {'; '.join(found[:INPUTS_SHOWN])}{more}"] if found else []


def _graphs(first: Side, other: Side) -> list[str]:
    """That the graphs which two compiled runs called are named otherwise; the rows alone look the same of any graph.

    No more is said: torch's version and settings are hashed with the graph.
    """
    if not first.graphs or not other.graphs or first.graphs == other.graphs:
        return []
    before, after = (_listed([f"{one[:HASH_SHOWN]}…" for one in side.graphs], FEW) for side in (first, other))
    several = len(first.graphs) > 1 or len(other.graphs) > 1
    has = "graphs have other hashes" if several else "graph has another hash"
    return [f"the compiled {has}: {before}, then {after}"]


def _renamed_epilogues(gone: Counter, new: Counter) -> Iterator[tuple[str, str]]:
    """Pairs of GEMM kernels that differ in nothing that their names say but the epilogue, each in one pair."""

    def but_the_epilogue(name: str) -> tuple | None:
        says = decode(name)
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


def _merged(first: Side, gone: Counter, new: Counter) -> tuple[list[str], str] | None:
    """The pointwise kernels that one new kernel replaces, by the ops that it does: each as often as it runs."""
    candidates = [name for name in new if decode(name).family == "pointwise"]
    if len(candidates) != 1:
        return None
    (after,) = candidates
    does = _fuses(after)
    replaced = [
        name
        for name in dict.fromkeys(one.name for one in first.summary.gpu_work)
        if gone[name] == first.work[name] == new[after] and decode(name).family == "pointwise" and what(name) in does
    ]
    return (replaced, after) if len(replaced) > 1 else None


def _fuses(name: str) -> Sequence[str]:
    """The ops that a fused kernel's name tells."""
    said = decode(name).parts.get("fuses", "")
    if said:
        return said.removeprefix("fuses ").split(", ")
    return next((ops for word, ops in FUSED_BY_HAND if word in name), ())


def what(name: str) -> str:
    """What a kernel does, in a word where its name tells."""
    says = decode(name)
    does = says.parts.get("does") or short(name)
    return f"{says.family} {does}" if does in ("forward", "backward") else does


def _counted(names: Counter, side: Side | None = None, shown: int = NAMES_SHOWN) -> str:
    """The names with their counts, those that cost most first."""
    costliest = sorted(names.items(), key=lambda item: -side.times[item[0]] if side else 0)
    told = [
        f"{count} x {short(name, 60)}" + (f" ({_of(count, side.work[name])}{side.times[name]:.1f} µs)" if side else "")
        for name, count in costliest[:shown]
    ]
    return ", ".join(told) + _more(len(names), shown)


def _of(count: int, total: int) -> str:
    """Times are of all pieces of a name: said where only some of them are meant."""
    return "" if count == total else f"of {total} in "


def _listed(names: Sequence[str], shown: int = OPS_SHOWN) -> str:
    return ", ".join(names[:shown]) + _more(len(names), shown)


def _more(count: int, shown: int = NAMES_SHOWN) -> str:
    return f" and {count - shown:,} more" if count > shown else ""


def setup(side: Side) -> str:
    """What one run does on the GPU in a step: GEMMs counted, other kernels by what they do."""
    parts = _parts(side)
    shown = ", ".join(f"{count} x {part}" for part, count in parts.most_common(NAMES_SHOWN))
    return shown + _more(len(parts)) or "no GPU work"


def change(before: Side, after: Side) -> str:
    """What one run does on the GPU that another did not, in words; by its ops where neither has GPU work."""
    on_gpu = before.summary.has_gpu_work or after.summary.has_gpu_work
    first, other = (_parts(before), _parts(after)) if on_gpu else (before.ops, after.ops)
    told = []
    for how, parts, side in (("gone", first - other, before), ("new", other - first, after)):
        us = _part_times(side) if on_gpu else parts
        shown = [f"{parts[part]} x {part}" for part in sorted(parts, key=lambda part: -us[part])[:FEW]]
        told += [f"{how}: {', '.join(shown)}{_more(len(parts), FEW)}"] if shown else []
    if told:
        return "; ".join(told)
    same = "the same things on the GPU" if on_gpu else "the same ops"
    others = ", with other inputs" if _inputs(before, after) else ""
    return "; ".join([same + others, *_flags(before, after), *_graphs(before, after)])


def _parts(side: Side) -> Counter:
    return Counter(_part(one) for one in side.summary.gpu_work)


def _part_times(side: Side) -> Counter:
    times = Counter()
    for one in side.summary.gpu_work:
        times[_part(one)] += one.us
    return times


def _part(one: GpuWork) -> str:
    """What a piece of work is, in a word or two."""
    if one.kind != "kernel":
        return "copy" if one.kind == "memcpy" else one.kind
    if one.family == "GEMM":
        return f"GEMM on {one.name_says['on']}" if "on" in one.name_says else "GEMM"
    if one.family == "attention":
        return f"attention {one.name_says.get('does', '')}".strip() + f" ({one.maker})"
    return what(one.name).replace(", ", " ")
