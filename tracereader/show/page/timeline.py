"""Packs the slices of a trace as columns of numbers, which the page's timeline draws.

A column is an array of whole numbers, packed by byte planes, so that gzip finds the many zeros in it. The browser
unpacks it into a typed array. A million slices take a fraction of a second. Every slice that the reader keeps is in the
columns. Slices narrower than a pixel are merged when they are drawn, and the page gives their number.
"""

import re
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from operator import sub

from tracereader.figures.gpu_time import busiest, parts_by_device
from tracereader.figures.regime import waits_for_gpus
from tracereader.figures.steps import typical
from tracereader.figures.summary import window
from tracereader.trace import Op, Step, Trace, Work, start_of
from tracereader.trace.decoded import decoded
from tracereader.trace.families import says
from tracereader.trace.grouped import grouped
from tracereader.trace.kernel_names import FAMILIES
from tracereader.trace.slices import Phase, with_depths

NOBODY = 0  # in a column of places that count from 1
KINDS = (
    "label", "op", "runtime", "module", "overhead", "kernel", "memcpy", "memset", "span", "phase", "collective", "wait",
    "inside", "inside_wait",
)  # fmt: skip
COLUMNS = ("start", "dur", "name", "kind", "depth", "arguments", "launch", "piece", "family")
FAMILY_OF = {family: number for number, family in enumerate(FAMILIES)}
KIND_OF = {kind: number for number, kind in enumerate(KINDS)}
# Ids that tie one event to others. Every slice has different ones, and the timeline draws the ties.
without_ids = re.compile(
    rb'"(?<!\\")(?:External id|external id|correlation|Ev Idx|Record function id|Sequence number|Fwd thread id|'
    rb'Python id|Python parent id|Python module id|cbid)"\s*:\s*-?\d+\s*,?'
).sub
LEFT_OUT = "External id, correlation, Ev Idx, Record function id, Sequence number, Fwd thread id, Python ids, cbid"
TRAILING = re.compile(rb",\s*}\s*$")
# Bytes of arguments that a page holds. Further arguments are left out, and the page gives the number of their slices.
ARGUMENTS_HELD = 2_000_000
# Calls nested deeper than this are drawn in the last row.
DEEPEST = 250


def _column(name: str, values: Sequence[int]) -> tuple[dict, list[bytes]]:
    """Return the description of a column of non-negative whole numbers, and its bytes by planes."""
    most = max(values, default=0)
    code = next(code for code in "BHIQ" if most < 1 << 8 * array(code).itemsize)
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    data, size = packed.tobytes(), packed.itemsize
    return {"name": name, "bytes": size, "count": len(packed)}, [data[place::size] for place in range(size)]


class _Arguments:
    """Gives the arguments of slices numbers from 1 up, equal arguments the same. 0: no arguments, or left out."""

    def __init__(self):
        self.numbers: dict[bytes, int] = {b"": NOBODY}
        self.texts: list[object] = []
        self.held = 0
        self.left_out = 0

    def __getitem__(self, raw: bytes) -> int:
        text = without_ids(b"", raw)
        number = self.numbers.get(text)
        return self._new(text) if number is None else number

    def _new(self, text: bytes) -> int:
        if self.held + len(text) > ARGUMENTS_HELD:
            self.left_out += 1
            return NOBODY
        found = decoded(TRAILING.sub(b"}", text))
        if not isinstance(found, dict) or not found or _is_deep(found):
            self.numbers[text] = NOBODY
            self.left_out += found is not None and bool(found)
            return NOBODY
        self.held += len(text)
        self.texts.append(found)
        self.numbers[text] = len(self.texts)
        return len(self.texts)


def _kind(one: Op | Work | Phase) -> str:
    """Return what the timeline draws a slice as: of a kernel's phases, waits apart from work."""
    return "inside_wait" if isinstance(one, Phase) and one.waits else one.kind


def _is_deep(found: object) -> bool:
    """Return whether lists nest deeper than any profiler writes, because JSON's readers and writers recurse."""
    level = [found]
    for _ in range(DEEPEST):
        level = [
            below
            for one in level
            if isinstance(one, (dict, list))
            for below in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True


class Packing:
    """Collects tracks of one or several traces, so that no trace has to be kept until all are read."""

    def __init__(self):
        self.names: dict[str, int] = {}  # numbers, in the order in which the names come
        self.arguments = _Arguments()
        # The slices of threads and of streams, as columns that grow track by track.
        self.tracks: dict[str, list[dict]] = {"CPU": [], "GPU": []}
        self.columns: dict[str, dict[str, list[int]]] = {side: {name: [] for name in COLUMNS} for side in self.tracks}
        self.end = 0

    def add(self, group: str, title: str, rows: Sequence[tuple], zero: int) -> None:
        """Add a track. rows: slices with their depths, by start. zero: the origin of the page's times (ns)."""
        side = "GPU" if group == "GPU" else "CPU"
        slices = [one for one, _ in rows]
        columns, names, arguments = self.columns[side], self.names, self.arguments
        starts = array("q", [one.start - zero for one in slices])
        columns["start"].extend(starts[:1])
        columns["start"].extend(map(sub, starts[1:], starts[:-1]))  # the others by the difference from the one before
        columns["dur"].extend([one.dur for one in slices])
        columns["name"].extend([names.setdefault(one.name, len(names)) for one in slices])
        columns["kind"].extend([KIND_OF.get(_kind(one), KIND_OF["module"]) for one in slices])
        columns["depth"].extend([depth for _, depth in rows])
        columns["arguments"].extend([arguments[one.raw] for one in slices])
        self.tracks[side].append({"group": group, "title": title, "slices": len(rows)})
        self.end = max(self.end, max((one.end for one in slices), default=zero) - zero)

    def add_trace(
        self, trace: Trace, pieces: Mapping[int, int], zero: int, steps: Sequence[Step] | None = None, run: str = ""
    ) -> None:
        """Add all tracks of a trace. steps: if given, only their slices are added.

        pieces: by the id of a GPU activity, the number to keep for it. run: the prefix of each track's title.
        """
        place: dict[int, int] = {}
        for title, rows in _cpu_tracks(trace, steps):
            first = len(self.columns["CPU"]["name"]) + 1
            place.update((id(one), at) for at, (one, _) in enumerate(rows, first) if one.kind == "runtime")
            self.add("CPU", run + title, rows, zero)
        if trace.overheads and steps is None:
            self.add("CPU", run + "profiler and driver overhead", _stacked(trace.overheads), zero)
        blocks = grouped((one.track, one) for one in trace.inside) if steps is None else {}
        for number, phases in enumerate(blocks.values(), 1):
            self.add("inside", f"{run}inside a kernel: recorded block {number}", _stacked(phases), zero)
        for title, rows in _gpu_tracks(trace, steps):
            self.add("GPU", run + title, rows, zero)
            columns, work = self.columns["GPU"], [one for one, _ in rows]
            columns["launch"].extend([place.get(id(one.launch), NOBODY) for one in work])
            columns["piece"].extend([pieces.get(id(one), NOBODY) for one in work])
            columns["family"].extend([0 if one.kind == "span" else FAMILY_OF[says(one).family] for one in work])

    def packed(self, more: dict) -> tuple[dict, list[bytes]]:
        """Return the timeline's data: a description for JSON, and the columns' bytes.

        Times are whole ns. Slices are in the order of their tracks, and in each by start. `launch` of GPU work is the
        position of its launch call among them, from 1 up.
        """
        cpu, gpu = self.columns.values()
        columns = [_column(name, cpu[name] + gpu[name]) for name in COLUMNS]  # threads have no launch, piece or family
        return (
            {
                "end": self.end,
                "kinds": KINDS,
                "families": FAMILIES,
                "names": list(self.names),
                "arguments": self.arguments.texts,
                "arguments_left_out": self.arguments.left_out,
                "ids_left_out": LEFT_OUT,
                "tracks": self.tracks["CPU"] + self.tracks["GPU"],
                "first_work": len(cpu["name"]),
                "work": len(gpu["name"]),
                "columns": [described for described, _ in columns],
                "idle": None,
                "memory": [],
                **more,
            },
            [plane for _, planes in columns for plane in planes],
        )


def packed(trace: Trace, pieces: Mapping[int, int]) -> tuple[dict, list[bytes]]:
    """Return one trace's data, as Packing.packed() does. Times count from the first slice."""
    packing = Packing()
    first = [one.start for one in (*trace.work[:1], *trace.overheads[:1], *trace.inside[:1])]
    zero = min([*first, *(one.start for one in trace.tops), *(one.start for one in trace.spans)], default=0)
    zero = min([zero, *(roots[0].start for roots in trace.modules.values() if roots)])
    packing.add_trace(trace, pieces, zero)
    steps = [
        {"name": one.name, "start": one.start - zero, "end": one.end - zero}
        | {"work_end": max((work.end for work in one.work), default=one.end) - zero}
        for one in trace.steps
    ]
    return packing.packed({"steps": steps, "idle": _idle(trace, zero), "memory": list(_memory(trace, zero))})


def _cpu_tracks(trace: Trace, steps: Sequence[Step] | None) -> Iterator[tuple[str, list[tuple[Op, int]]]]:
    """Yield each thread's title and slices with their depths, by start. A thread's modules come before its calls."""
    tops = sorted(trace.tops, key=start_of) if steps is None else [root for step in steps for root in step.roots]
    for track, some in grouped((top.track, top) for top in tops).items():
        # The walk yields parents first, but a call that outlasts its parent may start after its parent's next sibling.
        modules = trace.modules.get(track, ()) if steps is None else ()
        if modules:
            yield f"thread {track[1]}: modules", _rows(modules)
        yield f"thread {track[1]}", sorted(_rows(some), key=lambda row: row[0].start)


def _rows(roots: Sequence[Op]) -> list[tuple[Op, int]]:
    return [(op, min(depth, DEEPEST)) for op, depth in with_depths(roots)]


def _gpu_tracks(trace: Trace, steps: Sequence[Step] | None) -> Iterator[tuple[str, list[tuple[Work, int]]]]:
    """Yield each stream's title and work, the busiest stream first. A stream's annotations come before its work."""
    several = len({one.device for one in trace.work}) > 1
    work = trace.work if steps is None else [one for step in steps for one in step.work]
    streams = grouped((one.track, one) for one in work)
    by_start = sorted(trace.spans if steps is None else (), key=lambda one: (one.start, -one.dur))
    spans = grouped((one.track, one) for one in by_start)
    for track in sorted(streams, key=lambda track: -len(streams[track])):
        device = f"GPU {streams[track][0].device} " if several else "GPU "
        if track in spans:
            yield f"{device}stream {track[1]}: annotations", _stacked(spans[track])
        yield f"{device}stream {track[1]}", _stacked(streams[track])


def _stacked(slices: Sequence) -> list[tuple]:
    """Return slices with their rows. Each slice, by start, takes the first row that is free."""
    ends: list[int] = []
    rows = []
    for one in slices:
        row = next((row for row, end in enumerate(ends) if end <= one.start), len(ends))
        if row == len(ends) and row < DEEPEST:
            ends.append(0)
        ends[min(row, DEEPEST - 1)] = one.end
        rows.append((one, min(row, DEEPEST - 1)))
    return rows


def _idle(trace: Trace, zero: int) -> dict | None:
    """Return the idle gaps of the busiest device in the figures' window, by cause: [start, length, …] in ns."""
    _, start, end = window(trace, typical(trace))
    waits = waits_for_gpus(trace) if len(trace.devices) > 1 else None
    parts = busiest(parts_by_device(trace.work, start, end, waits))
    if parts is None or trace.quality.incomplete:
        return None
    gaps = {
        cause: [edge for left, right in getattr(parts, cause) for edge in (left - zero, right - left)]
        for cause in ("not_launched", "launched", "unknown", "elsewhere")
    }
    return {"device": str(parts.device), "start": start - zero, "end": end - zero, **gaps}


# The points of the memory curve. Of more events, each point keeps the largest total of its interval.
MEMORY_POINTS = 2_000


def _memory(trace: Trace, zero: int) -> Iterator[dict]:
    """Yield the allocated memory over time, by device: [time, bytes, …]."""
    by_device = grouped((one.device, (max(0, one.time - zero), one.total)) for one in trace.memory)
    for device, points in sorted(by_device.items(), reverse=True):
        events = len(points)
        each = -(-events // MEMORY_POINTS)
        if each > 1:
            points = [max(points[at : at + each], key=lambda point: point[1]) for at in range(0, events, each)]
        title = "CPU" if device < 0 else f"GPU {device}"
        yield {"device": title, "events": events, "each": each, "points": [x for point in points for x in point]}
