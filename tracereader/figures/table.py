"""torch's profiler table, from the trace: every name's self and total time on both sides, over the whole recording."""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from tracereader.trace import STEP, Op, Trace, start_of
from tracereader.trace.grouped import grouped, totals
from tracereader.trace.labels import COLLECTIVE
from tracereader.trace.slices import asking_ops, dur_of

# Names that torch leaves out of its own table (torch.autograd.profiler_util, 2.11 to 2.15).
NOT_IN_IT = {
    "profiler::_record_function_enter", "profiler::_record_function_enter_new", "profiler::_record_function_exit",
    "aten::is_leaf", "aten::output_nr", "aten::_version",
}  # fmt: skip
EVERY_STEP = f"{STEP[:-1]}*"  # one row for all steps' marks, as in torch's table


class Row(msgspec.Struct, frozen=True):
    """All calls of one name, in µs. on_gpu: a kernel, copy or memset; False for a slice of the CPU lane.

    Total time includes the calls below, self time excludes them. The GPU time of a CPU row is the time of the work that
    it (with the calls below) launched.
    """

    name: str
    on_gpu: bool
    calls: int
    self_cpu_us: float
    total_cpu_us: float
    self_gpu_us: float
    total_gpu_us: float


class LabelSpan(msgspec.Struct, frozen=True):
    """The second row of an annotation in torch's own table: from its first to its last kernel, including idle gaps."""

    name: str
    calls: int
    us: float


class Table(msgspec.Struct, frozen=True):
    """rows: the costliest first. The totals are torch's last lines, in which each self time counts once."""

    rows: tuple[Row, ...]
    label_spans: tuple[LabelSpan, ...]
    self_cpu_us: float
    self_gpu_us: float
    label: str | None  # the first annotation below the steps' marks
    label_calls: dict[str, float]  # its direct calls, by name: total CPU µs


def profiler_table(trace: Trace) -> Table:
    """Return all of a recording by name, as torch's key_averages() sums it up."""
    nodes, parents = _nested(trace)
    own, launched = [op.dur for op in nodes], [0] * len(nodes)
    place = {id(op): number for number, op in enumerate(nodes)}
    work = [one for one in trace.work if one.launch is not None]
    for one, op in zip(work, asking_ops(work), strict=True):
        while op is not None and id(op) not in place:
            op = op.parent
        if op is not None:
            launched[place[id(op)]] += one.dur
    children = Counter(parent for parent in parents if parent is not None)
    for number, parent in enumerate(parents):
        if parent is not None:
            own[parent] -= nodes[number].dur
    reached = launched.copy()
    rows: dict[tuple[str, bool], list[int]] = {}
    for number in range(len(nodes) - 1, -1, -1):  # children before their parents
        parent = parents[number]
        if parent is not None and nodes[parent].name == nodes[number].name and children[parent] == 1:
            # An op that only calls itself again counts as one call in torch's table.
            own[parent] += own[number]
            launched[parent], reached[parent] = launched[number], reached[number]
            children[parent] = children[number]
            continue
        if parent is not None:
            reached[parent] += reached[number]
        _add(rows, (_name(nodes[number]), False), own[number], nodes[number].dur, launched[number], reached[number])
    for op in _every(trace):
        if COLLECTIVE.match(op.name):
            _add(rows, (op.name, False), 0, op.dur, 0, 0)
    for one in trace.work:
        _add(rows, (one.name, True), 0, 0, one.dur, one.dur)
    found = [Row(name, on_gpu, times[0], *(ns / 1e3 for ns in times[1:])) for (name, on_gpu), times in rows.items()]
    spans = grouped((_name(span), span.dur) for span in trace.spans)
    label, inside = _label(nodes, parents)
    return Table(
        rows=tuple(sorted(found, key=lambda row: (-row.total_gpu_us, -row.total_cpu_us, row.name))),
        label_spans=tuple(LabelSpan(name, len(ns), sum(ns) / 1e3) for name, ns in spans.items()),
        self_cpu_us=sum(row.self_cpu_us for row in found),
        self_gpu_us=sum(row.self_gpu_us for row in found if row.on_gpu),
        label=label,
        label_calls=inside,
    )


def _add(rows: dict, key: tuple[str, bool], *times: int) -> None:
    row = rows.setdefault(key, [0, 0, 0, 0, 0])
    row[0] += 1
    for place, ns in enumerate(times, start=1):
        row[place] += ns


def _name(one) -> str:
    return EVERY_STEP if one.name.startswith(STEP) else one.name


def _every(trace: Trace) -> Iterator[Op]:
    return (op for top in trace.tops for op in top.walk())


def _nested(trace: Trace) -> tuple[list[Op], list[int | None]]:
    """Return every slice of the CPU lane, and the index of its parent, which comes before it.

    The nesting is torch's: the profiler's own slices lie in the calls of the thread that runs the steps. Nothing lies
    in a collective, which begins on one thread and ends on another. A slice that ends after the slice in which it
    starts does not lie in it.
    """
    shown = (op for op in _every(trace) if op.name not in NOT_IN_IT and not COLLECTIVE.match(op.name))
    tracks = grouped((op.track, op) for op in shown)
    marks = [op for ops in tracks.values() for op in ops if op.kind == "label" and op.name.startswith(STEP)]
    main = marks[0].track if marks else max(tracks, key=lambda track: len(tracks[track]), default=None)
    tracks[main] += trace.overheads
    nodes, parents = [], []
    for ops in tracks.values():
        ops.sort(key=dur_of, reverse=True)
        ops.sort(key=start_of)
        open_: list[int] = []
        for op in ops:
            while open_ and (op.start >= nodes[open_[-1]].end or op.end > nodes[open_[-1]].end):
                open_.pop()
            parents.append(open_[-1] if open_ else None)
            open_.append(len(nodes))
            nodes.append(op)
    return nodes, parents


def _label(nodes: Sequence[Op], parents: Sequence[int | None]) -> tuple[str | None, dict[str, float]]:
    """Return the first annotation below the steps, and the direct calls of all slices of its name, by name."""
    name = next((op.name for op in nodes if op.kind == "label" and not op.name.startswith(STEP)), None)
    inside = totals(
        (op.name, op.dur)
        for op, parent in zip(nodes, parents, strict=True)
        if parent is not None and nodes[parent].name == name and nodes[parent].kind == "label"
    )
    return name, {name: ns / 1e3 for name, ns in inside.most_common()}
