"""What changed between runs, and what stayed the same: facts for the report, no printing."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from common import kernel_names, reading
from common.trace import Trace

COMPILE_ROWS = ("TorchDynamo", "Torch-Compiled Region", "Pregraph", "AOTDispatcher", "## Call CompiledFxGraph")


@dataclass(frozen=True)
class Side:
    """One run's typical step, as compared."""

    trace: Trace

    @cached_property
    def name(self) -> str:
        """script and tag of a numbered script's trace; else the file's name."""
        stem = self.trace.path.name.removesuffix(".gz").removesuffix(".json")
        script = self.trace.lesson.get("script")
        return f"{script} {stem}" if script else stem

    @cached_property
    def cpu_us(self) -> float:
        return reading.typical(self.trace).us

    @cached_property
    def busy_us(self) -> float:
        return reading.busy_us(reading.typical(self.trace).work)

    @cached_property
    def launches(self) -> int:
        return reading.launches(reading.typical(self.trace))

    @cached_property
    def rows(self) -> tuple[reading.WorkRow, ...]:
        return reading.work_rows(self.trace)

    @cached_property
    def work(self) -> Counter:
        return Counter(row.work.name for row in self.rows)

    @cached_property
    def ops(self) -> Counter:
        """Ops by name; of torch.compile's rows, no hash and no number."""
        counts = Counter()
        for name, count in reading.op_counts(self.trace).items():
            counts[next((row for row in COMPILE_ROWS if name.startswith(row)), name)] += count
        return counts

    def us_of(self, name: str) -> float:
        return sum(row.us for row in self.rows if row.work.name == name)

    def count(self, kind: str) -> int:
        return reading.count_per_step(self.trace, kind)


@dataclass(frozen=True)
class Difference:
    """One run against the first: each list in words, for the two columns."""

    changed: tuple[str, ...]
    same: tuple[str, ...]


def difference(first: Side, other: Side) -> Difference:
    changed, same = [], []
    kept, gone, new = first.work & other.work, first.work - other.work, other.work - first.work

    for before, after in _renamed_epilogues(gone, new):
        count = min(gone[before], new[after])
        if not count:  # already the partner of another
            continue
        gone[before] -= count
        new[after] -= count
        changed.append(
            f"{kernel_names.short(before)} becomes {kernel_names.short(after)}: same tile and layout, "
            f"epilogue {kernel_names.decode(before).parts.get('epilogue', 'none')} → "
            f"{kernel_names.decode(after).parts.get('epilogue', 'none')}"
        )
    gone, new = +gone, +new
    merged = _merged(first, other, gone, new)
    if merged:
        before, after = merged
        parts = " + ".join(f"{_what(name)} {first.us_of(name):.1f}" for name in before)
        changed.append(
            f"{parts} µs → one kernel, {kernel_names.short(after, 60)} {other.us_of(after):.1f} µs: what lay between "
            "them no longer goes through memory"
        )
        for name in before:
            del gone[name]
        del new[after]
    if gone:
        changed.append("GPU work gone: " + _counted(gone, first))
    if new:
        changed.append("GPU work new: " + _counted(new, other))
    if kept:
        gemms = Counter({name: n for name, n in kept.items() if kernel_names.decode(name).family == "GEMM"})
        others = kept - gemms
        if gemms:
            same.append(f"{gemms.total()} of the GEMMs, by kernel name: {_counted(gemms)}")
        if others:
            same.append(_counted(others))

    ops_gone = sorted(set(first.ops) - set(other.ops))
    ops_new = sorted(set(other.ops) - set(first.ops))
    if ops_gone:
        changed.append("ops gone: " + ", ".join(ops_gone))
    if ops_new:
        rows = [name for name in ops_new if name in COMPILE_ROWS]
        plain = [name for name in ops_new if name not in COMPILE_ROWS and name not in other.work]
        if rows:
            changed.append(f"torch.compile's rows before the ops: {', '.join(rows)}")
        if plain:
            changed.append("ops new: " + ", ".join(plain))
    ops_same = sorted(set(first.ops) & set(other.ops))
    if ops_same:
        same.append("ops: " + ", ".join(ops_same))
    return Difference(tuple(changed), tuple(same))


def _renamed_epilogues(gone: Counter, new: Counter):
    """Pairs of GEMM kernels that differ in nothing that their names say but the epilogue."""
    for before in gone:
        for after in new:
            one, two = kernel_names.decode(before), kernel_names.decode(after)
            if one.family == two.family == "GEMM" and one.maker == two.maker and "tile" in one.parts:
                differing = {key for key in one.parts | two.parts if one.parts.get(key) != two.parts.get(key)}
                if differing == {"epilogue"}:
                    yield before, after


def _merged(first: Side, other: Side, gone: Counter, new: Counter) -> tuple[list[str], str] | None:
    """The pointwise kernels that one new kernel replaces, by the ops in its name or by their going."""
    pointwise = [row.work.name for row in first.rows if row.work.name in gone and row.says.family == "pointwise"]
    candidates = [name for name in new if kernel_names.decode(name).family == "pointwise"]
    if len(pointwise) < 2 or len(candidates) != 1:
        return None
    (after,) = candidates
    named = [name for name in pointwise if _what(name) in after]
    # A hand-written kernel (geglu) need not name each op that it does.
    return (named, after) if len(named) > 1 else (pointwise, after)


def _what(name: str) -> str:
    parts = kernel_names.decode(name).parts
    return parts.get("does") or kernel_names.short(name)


def _counted(names: Counter, side: Side | None = None) -> str:
    return ", ".join(
        f"{count} x {kernel_names.short(name, 60)}" + (f" ({side.us_of(name):.1f} µs)" if side else "")
        for name, count in names.items()
    )


def setup(side: Side) -> str:
    """What one run does on the GPU in a step: GEMMs counted, other kernels by what they do."""
    parts = Counter(
        _what(row.work.name) if row.work.kind == "kernel" and row.says.family != "GEMM"
        else {"kernel": "GEMM", "memcpy": "copy"}.get(row.work.kind, row.work.kind)
        for row in side.rows
    )  # fmt: skip
    return ", ".join(f"{count} x {part}" for part, count in parts.most_common()) or "no GPU work"
