"""What changed between two runs' typical steps, and what stayed the same."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tracereader.figures import changed_work
from tracereader.figures.changed_work import NAMES_SHOWN, and_more
from tracereader.figures.side import Side
from tracereader.trace.labels import COMPILE_ROWS

OPS_SHOWN, FEW = 40, 6
HASH_SHOWN = 12  # letters of 52
ONE_ALONE = "only one of the two has GPU work"
INPUTS_SHOWN = 2  # ops: one type or size changed goes through them all


def devices_of(side: Side) -> str:
    """The names of the devices that a run's GPU work ran on."""
    return ", ".join(dict.fromkeys(side.summary.source.devices)) or "CPU only"


def told_apart(sides: Sequence[Side]) -> list[str]:
    """A name for each run: where names repeat with its device, and where that repeats with its folder."""
    names = [side.name for side in sides]
    devices = [devices_of(side) for side in sides]
    for more in (devices, [str(Path(side.summary.source.trace).parent) for side in sides]):
        times = Counter(names)
        if any(len({one for one, same in zip(more, names, strict=True) if same == name}) > 1 for name in times):
            names = [f"{name}, {one}" if times[name] > 1 else name for name, one in zip(names, more, strict=True)]
    return names


@dataclass(frozen=True)
class Difference:
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
    alone = _one_alone_on_a_gpu(first, other)
    work_changed, work_same = ([ONE_ALONE], []) if alone else changed_work.in_lists(first, other)
    ops_changed, ops_same = _ops(first, other)
    flags_changed = _flags(first, other)
    return Difference(*map(tuple, (flags_changed, work_changed, ops_changed, work_same, ops_same)))


def flags(first: Side, other: Side) -> str:
    """The flags in which two runs of numbered scripts differ, as one text; "" without any."""
    return "; ".join(_flags(first, other))


def _flags(first: Side, other: Side) -> list[str]:
    """The flags that two runs of numbered scripts share and that have different values."""
    before, after = (
        {name: _value(flag) for name, flag in side.summary.source.facts.flags.items()} for side in (first, other)
    )
    told = [
        f"{name} {before[name]}, then {after[name]}" for name in before if after.get(name, before[name]) != before[name]
    ]
    return ["flags: " + "; ".join(told)] if told else []


def _value(flag: object) -> str:
    return "not given" if flag is None or flag is False else "given" if flag is True else str(flag)


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
    ops = other.summary.cpu.ops
    for name in sorted(ops, key=lambda name: -ops[name].self_us):
        before, after = (Counter(side.summary.cpu.inputs.get(name)) for side in (first, other))
        if before and after and before != after and before.total() == after.total():
            gone, new = (
                _listed([one for one, _ in some.most_common()], 1) for some in (before - after, after - before)
            )
            found.append(f"{name} {gone}, then {new}")
    rest = and_more(len(found), INPUTS_SHOWN).replace(" more", " more ops")
    return [f"inputs: {'; '.join(found[:INPUTS_SHOWN])}{rest}"] if found else []


def _graphs(first: Side, other: Side) -> list[str]:
    """Says that two compiled runs called graphs with different hashes. Apart from these, all graphs' rows look alike.

    It says no more, because torch's version and settings are part of the hash.
    """
    if not first.graphs or not other.graphs or first.graphs == other.graphs:
        return []
    before, after = (_listed([f"{one[:HASH_SHOWN]}…" for one in side.graphs], FEW) for side in (first, other))
    several = len(first.graphs) > 1 or len(other.graphs) > 1
    has = "graphs have other hashes" if several else "graph has another hash"
    return [f"the compiled {has}: {before}, then {after}"]


def _listed(names: Sequence[str], shown: int = OPS_SHOWN) -> str:
    return ", ".join(names[:shown]) + and_more(len(names), shown)


def setup(side: Side) -> str:
    """What one run does on the GPU in a step: GEMMs counted, other kernels by what they do."""
    parts = Counter()
    for name, count in side.work.items():
        parts[side.parts[name]] += count
    shown = ", ".join(f"{count} x {part}" for part, count in parts.most_common(NAMES_SHOWN))
    return shown + and_more(len(parts), NAMES_SHOWN) or "no GPU work"


def change(before: Side, after: Side) -> str:
    """What one run does on the GPU and another does not, as text; by ops where neither has GPU work."""
    on_gpu = before.summary.has_gpu_work and after.summary.has_gpu_work
    told, other_work = (changed_work.in_short if on_gpu else _ops_in_short)(before, after)
    if _one_alone_on_a_gpu(before, after):
        told = [ONE_ALONE, *told]
    if not told:
        same = "the same GPU work" if on_gpu else "the same ops"
        told = [same + (", with other inputs" if _inputs(before, after) else "")]
        ops, other_work = _ops_in_short(before, after) if on_gpu else ([], False)
        told += [f"ops {text}" for text in ops]
    graphs = [] if other_work else _graphs(before, after)
    return "; ".join([*told, *_flags(before, after), *graphs])


def _one_alone_on_a_gpu(first: Side, other: Side) -> bool:
    """Whether only one of the two runs has GPU work."""
    return first.summary.has_gpu_work != other.summary.has_gpu_work


def _ops_in_short(before: Side, after: Side) -> tuple[list[str], bool]:
    told = []
    for how, ops in (("gone", before.ops - after.ops), ("new", after.ops - before.ops)):
        shown = [f"{count} x {op}" for op, count in ops.most_common(FEW)]
        told += [f"{how}: {', '.join(shown)}{and_more(len(ops), FEW)}"] if shown else []
    return told, bool(told)
