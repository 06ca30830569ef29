"""Sentences on the differences between two runs' typical steps, and on what stayed the same."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from tracereader.two_runs import compare, work_sentences
from tracereader.two_runs.side import Side
from tracereader.two_runs.work_sentences import NAMES_SHOWN, and_more

OPS_SHOWN, FEW = 40, 6
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
    work_changed, work_same = ([ONE_ALONE], []) if alone else work_sentences.in_lists(first, other)
    ops_changed, ops_same = _ops(first, other)
    text = flags(first, other)
    flags_changed = [text] if text else []
    return Difference(*map(tuple, (flags_changed, work_changed, ops_changed, work_same, ops_same)))


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
    rest = and_more(len(found), INPUTS_SHOWN).replace(" more", " more ops")
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
    return ", ".join(names[:shown]) + and_more(len(names), shown)


def setup(side: Side) -> str:
    """Return the GPU activities of one run's step as text, counted by operation."""
    parts = Counter()
    for name, count in side.work.items():
        parts[side.parts[name]] += count
    shown = ", ".join(f"{count} x {part}" for part, count in parts.most_common(NAMES_SHOWN))
    return shown + and_more(len(parts), NAMES_SHOWN) or "no GPU work"
