"""What changed between two runs' typical steps, and what stayed the same, in words."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tracereader.figures import compare
from tracereader.figures.side import Side
from tracereader.findings import work_differences
from tracereader.findings.work_differences import NAMES_SHOWN, and_more

OPS_SHOWN, FEW = 40, 6
HASH_SHOWN = 12  # letters of 52
ONE_ALONE = "only one of the two has GPU work"
INPUTS_SHOWN = 2  # ops: one type or size changed goes through them all


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
    alone = compare.only_one_has_gpu_work(first, other)
    work_changed, work_same = ([ONE_ALONE], []) if alone else work_differences.in_lists(first, other)
    ops_changed, ops_same = _ops(first, other)
    told = flags(first, other)
    flags_changed = [told] if told else []
    return Difference(*map(tuple, (flags_changed, work_changed, ops_changed, work_same, ops_same)))


def flags(first: Side, other: Side) -> str:
    """The flags in which two runs of numbered scripts differ, as one text; "" without any."""
    words = {None: "not given", True: "given"}
    told = [
        f"{one.name} {words.get(one.before, one.before)}, then {words.get(one.after, one.after)}"
        for one in compare.flags(first, other)
    ]
    return "flags: " + "; ".join(told) if told else ""


def _ops(first: Side, other: Side) -> tuple[list[str], list[str]]:
    found = compare.ops(first, other)
    calls = [f"{name} {before:,} → {after:,}" for name, (before, after) in found.calls.items()]
    changed = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("ops gone", found.gone),
            ("torch.compile's rows before the ops", found.rows_new),
            ("ops new", found.new),
            ("calls", calls),
        )
        if names
    ]
    changed += _inputs(first, other) + _graphs(first, other)
    return changed, ["ops: " + _listed(found.same, FEW)] if found.same else []


def _inputs(first: Side, other: Side) -> list[str]:
    found = compare.inputs(first, other)
    told = [f"{one.op} {_listed(one.before, 1)}, then {_listed(one.after, 1)}" for one in found[:INPUTS_SHOWN]]
    rest = and_more(len(found), INPUTS_SHOWN).replace(" more", " more ops")
    return [f"inputs: {'; '.join(told)}{rest}"] if told else []


def _graphs(first: Side, other: Side) -> list[str]:
    """Says that two compiled runs called graphs with different hashes. Apart from these, all graphs' rows look alike.

    It says no more, because torch's version and settings are part of the hash.
    """
    found = compare.graphs(first, other)
    if found is None:
        return []
    before, after = (_listed([f"{one[:HASH_SHOWN]}…" for one in graphs], FEW) for graphs in found)
    has = "graphs have other hashes" if max(map(len, found)) > 1 else "graph has another hash"
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
    told, other_work = (work_differences.in_short if on_gpu else _ops_in_short)(before, after)
    if compare.only_one_has_gpu_work(before, after):
        told = [ONE_ALONE, *told]
    if not told:
        same = "the same GPU work" if on_gpu else "the same ops"
        told = [same + (", with other inputs" if compare.inputs(before, after) else "")]
        ops, other_work = _ops_in_short(before, after) if on_gpu else ([], False)
        told += [f"ops {text}" for text in ops]
    graphs = [] if other_work else _graphs(before, after)
    return "; ".join(filter(None, [*told, flags(before, after), *graphs]))


def _ops_in_short(before: Side, after: Side) -> tuple[list[str], bool]:
    found = compare.ops(before, after)
    told = []
    for how, calls in (("gone", found.fewer), ("new", found.more)):
        shown = [f"{count} x {op}" for op, count in Counter(calls).most_common(FEW)]
        told += [f"{how}: {', '.join(shown)}{and_more(len(calls), FEW)}"] if shown else []
    return told, bool(told)
