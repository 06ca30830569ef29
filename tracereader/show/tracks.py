"""A trace's slices on tracks where they nest, as Perfetto needs them.

On one track, Perfetto's importer of Chrome's JSON drops a slice that starts in another one and ends after it, and one
with 512 others around it. Kernels of one stream overlap so under programmatic dependent launch. Here, such a slice
moves to a lane of its own, a track beside its track. Source: Perfetto's slice_tracker.cc and json_trace_tokenizer.cc.
"""

import gzip
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tracereader.trace import TraceError
from tracereader.trace.decoded import decoded
from tracereader.trace.document import LARGEST, json_of

DEEPEST = 512  # slices around each other
FIRST_LANE = 10**9  # the lowest number of a lane, above those of threads and of streams


class _Event(msgspec.Struct):
    """Of an event, what says where it stands."""

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
    """The trace as JSON that Perfetto shows whole, and how many of its slices are on lanes of their own.

    limit: the most JSON that is read. Raises TraceError.
    """
    try:
        found = _file.decode(json_of(path, limit))
        events, moved = on_lanes(found["traceEvents"])
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError):
        raise TraceError(f"{path}: cannot be copied for Perfetto (its events cannot be read as text)") from None
    members = (msgspec.json.encode(key) + b":" + raw for key, raw in (found | {"traceEvents": events}).items())
    return b"{" + b",\n".join(members) + b"}", moved


def packed_as(name: str, data: bytes) -> bytes:
    """The bytes of a file of that name: packed where it ends in .gz."""
    return gzip.compress(data, compresslevel=1) if name.endswith(".gz") else data


def on_lanes(events: bytes) -> tuple[bytes, int]:
    """A trace's events, as a JSON list, with what Perfetto would drop on lanes of their own; how many slices these are.

    All other events stay as they are written. Raises msgspec.MsgspecError where it is no list of objects.
    """
    found = _event.decode(events)
    slices = _slices(found)
    lanes = _lanes(slices)
    if not lanes:
        return events, 0
    # An arrow leads to the innermost slice that starts where it ends, which is the last one of these in the order.
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
    """What names the lanes, and puts them beside their tracks: by track and lane."""
    said: dict[tuple, dict] = {}
    for event in events:
        args = decoded(event.args) if event.ph == "M" else None
        if isinstance(args, dict):
            said.setdefault(_track(event), {})[event.name] = args
    for (track, lane), number in numbers.items():
        told = said.get(track, {})
        name = str(told.get("thread_name", {}).get("name", track[1])).strip()
        place = {"ph": "M", "pid": track[0], "tid": number, "ts": 0}
        yield msgspec.json.encode(place | {"name": "thread_name", "args": {"name": f"{name}, lane {lane + 1}"}})
        if "thread_sort_index" in told:
            yield msgspec.json.encode(place | {"name": "thread_sort_index", "args": told["thread_sort_index"]})


def _slices(events: list[_Event]) -> list[tuple]:
    """Start, end below zero, number and track of each slice, in the order in which Perfetto takes them."""
    found = []
    for number, event in enumerate(events):
        if event.ph == "X":
            start, dur = _ns(event.ts), _ns(event.dur)
            if start is not None and dur is not None and dur >= 0:
                found.append((start, -start - dur, number, _track(event)))
    found.sort()
    return found


def _lanes(slices: list[tuple]) -> dict[int, int]:
    """The lane of each slice, by number, that has to leave its track: 1 for the first one beside it."""
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
    """Whether a slice nests in what is open on a track. What has ended by its start is taken off the stack."""
    # Two slices without a duration at one time lie in each other there.
    while stack and (stack[-1][1] < start or (stack[-1][1] == start and not stack[-1][0] == start == end)):
        stack.pop()
    return not stack or (end <= stack[-1][1] and len(stack) < DEEPEST)


def _track(event: _Event) -> tuple:
    """The process and the thread as Perfetto distinguishes them."""
    pid, tid = (
        (one if 0 <= one < 2**32 else 0) if type(one) is int else str(one) if one is not None else 0
        for one in (event.pid, event.tid)
    )
    return pid, pid if tid == 0 else tid


def _ns(us: object) -> int | None:
    """Perfetto's rounding of µs, away from zero; None for no number."""
    if type(us) is int:
        return us * 1000
    if type(us) is not float or not math.isfinite(us) or abs(us) >= LARGEST:
        return None
    ns = abs(us) * 1000.0
    whole = int(ns)
    return int(math.copysign(whole + (ns - whole >= 0.5), us))
