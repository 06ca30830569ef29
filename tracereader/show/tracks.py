"""Moves a trace's slices to tracks on which they nest, because Perfetto drops others or moves them away.

Older versions of Perfetto drop them; newer ones draw them on an overflow track, apart from their own track's slices.

On one track, the older importer of Chrome's JSON drops a slice that starts in another one and ends after it, and one
with 512 others around it. Kernels of one stream overlap in this way under programmatic dependent launch.
Such a slice moves to a lane, which is a further track beside its own. Source: Perfetto's slice_tracker.cc and
json_trace_tokenizer.cc.
"""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tracereader.trace import TraceError
from tracereader.trace.decoded import decoded
from tracereader.trace.document import json_of
from tracereader.trace.lenient import LARGEST

DEEPEST = 512  # levels of nested slices
FIRST_LANE = 10**9  # the lowest number of a lane, above those of threads and of streams


class _Event(msgspec.Struct):
    """The members of an event that give its place."""

    ph: object = ""
    pid: object = None
    tid: object = None
    ts: object = None
    dur: object = None
    name: object = ""
    args: msgspec.Raw = msgspec.Raw(b"null")


_raw = msgspec.json.Decoder(list[msgspec.Raw])
_event = msgspec.json.Decoder(list[_Event])
_file = msgspec.json.Decoder(dict[str, msgspec.Raw])


def copy_of(path: Path, limit: int) -> tuple[bytes, int]:
    """Return the trace as JSON of which Perfetto shows every slice, and how many slices moved. Raises TraceError."""
    try:
        found = _file.decode(json_of(path, limit))
        events, moved = on_lanes(found["traceEvents"])
    except (ValueError, KeyError, RecursionError):  # msgspec's errors are ValueErrors
        raise TraceError(f"{path}: cannot be copied for Perfetto (its events cannot be read as text)") from None
    members = (msgspec.json.encode(key) + b":" + raw for key, raw in (found | {"traceEvents": events}).items())
    return b"{" + b",\n".join(members) + b"}", moved


def on_lanes(events: bytes) -> tuple[bytes, int]:
    """Return a trace's events (a JSON list) with the slices that Perfetto would drop on lanes, and the number of these.

    All other events stay as they are written. Raises msgspec.MsgspecError if the JSON is no list of objects.
    """
    found = _event.decode(events)
    slices = _slices(found)
    lanes = _lanes(slices)
    if not lanes:
        return events, 0
    # An arrow ends at the innermost slice that starts there, which is the last of these slices in the order.
    starts = {(track, start): lanes.get(number) for start, _, number, track in slices}
    moved = dict(lanes)
    for number, event in enumerate(found):
        if event.ph in ("s", "t", "f") and (lane := starts.get((_track(event), _ns(event.ts)))):
            moved[number] = lane
    texts = _raw.decode(events)
    used = {one for event in found for one in (event.pid, event.tid) if type(one) is int}
    free = (number for number in itertools.count(FIRST_LANE) if number not in used)
    numbers: dict[tuple, int] = {}
    for number, lane in sorted(moved.items()):
        place = _track(found[number]), lane
        if place not in numbers:
            numbers[place] = next(free)
        event = json.loads(bytes(texts[number]))
        texts[number] = msgspec.json.encode(event | {"tid": numbers[place]})
    return b"[" + b",\n".join([*_names(found, numbers), *texts]) + b"]", len(lanes)


def _names(events: list[_Event], numbers: dict[tuple, int]) -> Iterator[bytes]:
    """Yield the events that name the lanes and sort them beside their tracks. numbers: by track and lane."""
    said: dict[tuple, dict] = {}
    for event in events:
        args = decoded(event.args) if event.ph == "M" else None
        if isinstance(args, dict):
            said.setdefault(_track(event), {})[event.name] = args
    for (track, lane), number in numbers.items():
        metadata = said.get(track, {})
        name = str(metadata.get("thread_name", {}).get("name", track[1])).strip()
        place = {"ph": "M", "pid": track[0], "tid": number, "ts": 0}
        yield msgspec.json.encode(place | {"name": "thread_name", "args": {"name": f"{name}, lane {lane + 1}"}})
        if "thread_sort_index" in metadata:
            yield msgspec.json.encode(place | {"name": "thread_sort_index", "args": metadata["thread_sort_index"]})


def _slices(events: list[_Event]) -> list[tuple]:
    """Return the start, the negative end, the number and the track of each slice, in Perfetto's order."""
    timed = ((_ns(event.ts), _ns(event.dur), number, event) for number, event in enumerate(events) if event.ph == "X")
    return sorted(
        (start, -start - dur, number, _track(event))
        for start, dur, number, event in timed
        if start is not None and dur is not None and dur >= 0
    )


def _lanes(slices: list[tuple]) -> dict[int, int]:
    """Return the lane of each slice that has to leave its track, by the slice's number. The first lane is 1."""
    found = {}
    tracks: dict[tuple, list[list[tuple[int, int]]]] = {}
    for start, below, number, track in slices:
        end = -below
        lanes = tracks.setdefault(track, [[]])
        lane = next((lane for lane, stack in enumerate(lanes) if _fits(stack, start, end)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append((start, end))
        if lane:
            found[number] = lane
    return found


def _fits(stack: list[tuple[int, int]], start: int, end: int) -> bool:
    """Return whether a slice nests in the open slices of a track. Slices that have ended leave the stack."""
    # In Perfetto, two slices without a duration at the same time nest.
    while stack and (stack[-1][1] < start or (stack[-1][1] == start and not stack[-1][0] == start == end)):
        stack.pop()
    return not stack or (end <= stack[-1][1] and len(stack) < DEEPEST)


def _track(event: _Event) -> tuple:
    """Return the process and the thread as Perfetto distinguishes them."""
    pid, tid = (
        (one if 0 <= one < 2**32 else 0) if type(one) is int else str(one) if one is not None else 0
        for one in (event.pid, event.tid)
    )
    return pid, pid if tid == 0 else tid


def _ns(us: object) -> int | None:
    """Return µs as ns with Perfetto's rounding, away from zero; None for a value that is no number."""
    if type(us) is int:
        return us * 1000
    if type(us) is not float or not math.isfinite(us) or abs(us) >= LARGEST:
        return None
    ns = abs(us) * 1000.0
    whole = int(ns)
    return int(math.copysign(whole + (ns - whole >= 0.5), us))
