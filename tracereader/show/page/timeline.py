"""The slices of a trace as columns of numbers: what the page's timeline draws.

A column is an array of whole numbers, packed byte plane by byte plane, so that gzip finds the many zeros in it. The
browser unpacks it into a typed array: a million slices take a fraction of a second. Every slice that the reader keeps
is in the columns; what is narrower than a pixel is merged when it is drawn, and the page says how much.
"""

import re
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import sub

from tracereader.figures.gpu_time import gpu_parts
from tracereader.figures.steps import typical
from tracereader.figures.summary import window
from tracereader.trace import Op, Trace, Work
from tracereader.trace.document import decoded
from tracereader.trace.families import says
from tracereader.trace.kernel_names import FAMILIES

NOBODY = 0  # in a column of places that count from 1
KINDS = ("label", "op", "runtime", "module", "overhead", "kernel", "memcpy", "memset", "span")
FAMILY_OF = {family: number for number, family in enumerate(FAMILIES)}
KIND_OF = {kind: number for number, kind in enumerate(KINDS)}
# Numbers that tie one event to others: every slice has its own, and the timeline draws what they tie.
IDS = re.compile(
    rb'"(?<!\\")(?:External id|external id|correlation|Ev Idx|Record function id|Sequence number|Fwd thread id|'
    rb'Python id|Python parent id|Python module id|cbid)"\s*:\s*-?\d+\s*,?'
)
LEFT_OUT = "External id, correlation, Ev Idx, Record function id, Sequence number, Fwd thread id, Python ids, cbid"
without_ids = IDS.sub
TRAILING = re.compile(rb",\s*}\s*$")
# Bytes of arguments that a page holds; what is beyond it is left out, and the page says of how many slices.
ARGUMENTS_HELD = 2_000_000
# A stack of calls deeper than this is drawn in its last row.
DEEPEST = 250


class Columns:
    """Collects columns of whole numbers from 0 up: what to call them, and their bytes."""

    def __init__(self):
        self.described: list[dict] = []
        self.chunks: list[bytes] = []

    def add(self, name: str, values: Sequence[int]) -> None:
        most = max(values, default=0)
        code = next(code for code in "BHIQ" if most < 1 << 8 * array(code).itemsize)
        packed = array(code, values)
        if sys.byteorder == "big":
            packed.byteswap()
        data = packed.tobytes()
        self.described.append({"name": name, "bytes": packed.itemsize, "count": len(packed)})
        self.chunks += [data[place :: packed.itemsize] for place in range(packed.itemsize)]


class _Names:
    """Numbers strings in the order in which they come."""

    def __init__(self):
        self.numbers: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


class _Arguments:
    """Numbers the arguments of slices, equal ones once, from 1 up; 0: a slice without any, or left out."""

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
        found = decoded(TRAILING.sub(b"}", text)) if len(text) < ARGUMENTS_HELD else None
        if not isinstance(found, dict) or not found:
            self.numbers[text] = NOBODY
            return NOBODY
        if self.held + len(text) > ARGUMENTS_HELD:
            self.left_out += 1
            return NOBODY
        self.held += len(text)
        self.texts.append(found)
        self.numbers[text] = len(self.texts)
        return len(self.texts)


def packed(trace: Trace, pieces: Mapping[int, int]) -> tuple[dict, list[bytes]]:
    """What the timeline draws: a description that JSON can hold, and the columns' bytes.

    Times are whole ns from the first slice on. Slices stand track by track, by start; `launch` of GPU work is the
    place of its launch call among them, from 1 up. pieces: by the id of GPU work, the number to keep of it.
    """
    names, arguments, columns = _Names(), _Arguments(), Columns()
    tracks, order = [], []
    for track, rows in _cpu_tracks(trace):
        tracks.append({"group": "CPU", "title": _thread(track), "slices": len(rows)})
        order.append(rows)
    gpu = list(_gpu_tracks(trace))
    for title, rows in gpu:
        tracks.append({"group": "GPU", "title": title, "slices": len(rows)})
        order.append(rows)
    if trace.overheads:
        rows = _stacked(trace.overheads)
        tracks.append({"group": "CPU", "title": "profiler and driver overhead", "slices": len(rows)})
        order.append(rows)
    slices = [one for rows in order for one, _ in rows]
    zero = min((one.start for one in slices), default=0)
    starts = array("q", (one.start - zero for one in slices))
    columns.add("start", _deltas(starts, [len(rows) for rows in order]))
    columns.add("dur", [one.dur for one in slices])
    columns.add("name", [names[one.name] for one in slices])
    columns.add("kind", [KIND_OF.get("module" if one.kind == "python" else one.kind, 0) for one in slices])
    columns.add("depth", [min(depth, DEEPEST) for rows in order for _, depth in rows])
    columns.add("arguments", [arguments[one.raw] for one in slices])
    place = {id(one): number for number, one in enumerate(slices, 1) if one.kind == "runtime"}
    work = [one for one in slices if type(one) is Work]
    columns.add("launch", [place.get(id(one.launch), NOBODY) for one in work])
    first_work = next((number for number, one in enumerate(slices) if type(one) is Work), len(slices))
    columns.add("piece", [pieces.get(id(one), NOBODY) for one in work])
    columns.add("family", [0 if one.kind == "span" else FAMILY_OF[says(one).family] for one in work])
    return (
        {
            "zero_us": trace.zero_us,
            "end": max((one.end for one in slices), default=0) - zero,
            "kinds": KINDS,
            "names": list(names.numbers),
            "arguments": arguments.texts,
            "arguments_left_out": arguments.left_out,
            "ids_left_out": LEFT_OUT,
            "tracks": tracks,
            "first_work": first_work,
            "work": len(work),
            "steps": [{"name": one.name, "start": one.start - zero, "end": one.end - zero} for one in trace.steps],
            "idle": _idle(trace, zero),
            "memory": _memory(trace, zero),
            "columns": columns.described,
        },
        columns.chunks,
    )


def _deltas(starts: array, lengths: Sequence[int]) -> array:
    """Each start less the one before it on its track; of a track's first slice, the start."""
    found, at = array("q"), 0
    for length in lengths:
        own = starts[at : at + length]
        found.extend(own[:1])
        found.extend(map(sub, own[1:], own[:-1]))
        at += length
    return found


def _thread(track: tuple) -> str:
    return f"thread {track[1]}"


def _cpu_tracks(trace: Trace) -> Iterator[tuple[tuple, list[tuple[Op, int]]]]:
    """Each thread's slices with their depth, by start; above a thread's calls, its modules."""
    tops = {}
    for root in chain((root for step in trace.steps for root in step.roots), trace.outside):
        while root.parent is not None:  # a label around the loop
            root = root.parent
        tops[id(root)] = root
    threads: dict[tuple, list[tuple[Op, int]]] = {}
    for top in sorted(tops.values(), key=lambda one: one.start):
        rows = threads.setdefault(top.track, [])
        stack = [(top, 0)]
        while stack:
            op, depth = stack.pop()
            rows.append((op, depth))
            if op.children:
                stack.extend([(child, depth + 1) for child in reversed(op.children)])
    for track, roots in trace.modules.items():
        rows = []
        stack = [(root, 0) for root in reversed(roots)]
        while stack:
            op, depth = stack.pop()
            rows.append((op, depth))
            stack.extend([(child, depth + 1) for child in reversed(op.children)])
        yield (track[0], f"{track[1]}: modules"), _by_start(rows)
    for track in threads:
        yield track, _by_start(threads[track])


def _by_start(rows: list[tuple]) -> list[tuple]:
    """Calls are walked parents first; one that outlasts its parent may start after its parent's next sibling."""
    return sorted(rows, key=lambda row: row[0].start)


def _gpu_tracks(trace: Trace) -> Iterator[tuple[str, list[tuple[Work, int]]]]:
    """Each stream's work, and above it the annotations that its work was launched in."""
    several = len({one.device for one in trace.work}) > 1
    streams: dict[tuple, list[Work]] = {}
    for one in trace.work:
        streams.setdefault(one.track, []).append(one)
    spans: dict[tuple, list[Work]] = {}
    for one in sorted(trace.spans, key=lambda one: (one.start, -one.dur)):
        spans.setdefault(one.track, []).append(one)
    for track in sorted(streams, key=lambda track: -len(streams[track])):
        device = f"GPU {streams[track][0].device} " if several else "GPU "
        if track in spans:
            yield f"{device}stream {track[1]}: annotations", _stacked(spans[track])
        yield f"{device}stream {track[1]}", _stacked(streams[track])


def _stacked(slices: Sequence) -> list[tuple]:
    """Slices by start, each in the first row that is free then."""
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
    """The gaps of the busiest device in the window that the figures speak of, by cause: [start, length, …] in ns."""
    _, start, end = window(trace, typical(trace))
    parts = gpu_parts(trace.work, start, end)
    if parts is None:
        return None
    causes = {"not_launched": parts.not_launched, "launched": parts.launched, "unknown": parts.unknown}
    return {
        "device": str(parts.device),
        "start": start - zero,
        "end": end - zero,
        **{
            name: [edge for left, right in gaps for edge in (left - zero, right - left)]
            for name, gaps in causes.items()
        },
    }


# Points of the curve of memory: of more events, the largest total of each stretch is kept.
MEMORY_POINTS = 2_000


def _memory(trace: Trace, zero: int) -> list[dict]:
    """What is allocated over time, by device: [time, bytes, …]."""
    by_device: dict[int, list[tuple[int, int]]] = {}
    for one in trace.memory:
        by_device.setdefault(one.device, []).append((max(0, one.time - zero), one.total))
    found = []
    for device, points in sorted(by_device.items(), reverse=True):
        events = len(points)
        each = -(-events // MEMORY_POINTS)
        if each > 1:
            points = [max(points[at : at + each], key=lambda point: point[1]) for at in range(0, events, each)]
        title = "CPU" if device < 0 else f"GPU {device}"
        found.append(
            {"device": title, "events": events, "each": each, "points": [x for point in points for x in point]}
        )
    return found
