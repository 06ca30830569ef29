"""The time from a launch call to its activity's start, and the gaps between GPU activities."""

import math
from collections import Counter

import msgspec

from tracereader.figures.gpu_time import by_thread, cut_up
from tracereader.trace import Op, Step, Trace, Work, start_of
from tracereader.trace.grouped import grouped
from tracereader.trace.intervals import Lengths


class Start(msgspec.Struct, frozen=True):
    """One GPU activity. Times are in µs; None if the trace has no launch of it or no activity before it.

    gap_us: the device's idle time since the previous activity (of this step or an earlier one). gap_in: the launching
    thread's activity meanwhile, the largest first. wait_us: from the start of the launch call to the start of the
    activity. Its parts add up to it: own_us (the profiler's and the driver's own slices, by name), queue_us (behind
    earlier work of its stream), call_us (the launch call itself) and way_us (the rest).
    """

    name: str
    gap_us: float | None
    gap_in: dict[str, float]
    wait_us: float | None
    own_us: dict[str, float]
    queue_us: float | None
    call_us: float | None
    way_us: float | None


def starts(trace: Trace, step: Step) -> tuple[Start, ...]:
    """Return each GPU activity of a step, in order."""
    number = trace.steps.index(step)
    near = trace.steps[max(0, number - 1) : number + 1]
    roots, outside = by_thread(near, step)
    inside = {id(one) for one in step.work}
    last = max([one.end for one in step.work], default=step.end)
    overheads = _apart([one for one in trace.overheads if one.start < last and one.end > step.start])
    free: dict[object, int] = {}  # the end of the work so far, by device
    stream_free: dict[tuple, int] = {}  # the same by stream
    found = []
    for one in trace.work:
        if id(one) in inside:
            before = free.get(one.device)
            gap = max(0, one.start - before) if before is not None else None
            idle = Counter()
            if gap and one.launch is not None:
                track = one.launch.track
                cut_up(roots[track], [(max(before, near[0].start), one.start)], idle, outside[track])
            found.append(_start(overheads, one, gap, idle, stream_free.get(one.track)))
        free[one.device] = max(free.get(one.device, one.end), one.end)
        stream_free[one.track] = max(stream_free.get(one.track, one.end), one.end)
    return tuple(found)


def _apart(slices: list[Op]) -> dict[str, Lengths]:
    """Return the time of some slices by name. A moment in two overlapping ones counts for the earlier one.

    They are cut once, because each wait may contain all of them.
    """
    by_name, reached = grouped(()), -math.inf
    for one in sorted(slices, key=start_of):
        start, reached = max(one.start, reached), max(one.end, reached)
        if start < one.end:
            by_name[one.name].append((start, one.end))
    return {name: Lengths(some) for name, some in by_name.items()}


def _start(overheads: dict[str, Lengths], one: Work, gap: int | None, idle: Counter, stream_free: int | None) -> Start:
    gap_us, gap_in = None if gap is None else gap / 1e3, {name: ns / 1e3 for name, ns in idle.most_common() if ns > 0}
    launch = one.launch
    if launch is None or launch.start > one.start:
        return Start(one.name, gap_us, gap_in, None, {}, None, None, None)
    own = Counter({name: some.between(launch.start, one.start) for name, some in overheads.items()})
    parts, at = [], launch.start  # in the queue, in the call, and the rest of the way
    for end in (stream_free or launch.start, launch.end, one.start):
        end = min(max(at, end), one.start)
        parts.append((end - at - sum(some.between(at, end) for some in overheads.values())) / 1e3)
        at = end
    own_us = {name: ns / 1e3 for name, ns in own.most_common() if ns > 0}
    return Start(one.name, gap_us, gap_in, (one.start - launch.start) / 1e3, own_us, *parts)
