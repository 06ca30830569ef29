"""The GPU's time by activity. The parts add up exactly to the window."""

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, repeat
from operator import attrgetter

import msgspec

from tracereader.figures.steps import ops_recorded, spanned
from tracereader.trace import Op, Step, Trace, Work, start_of
from tracereader.trace.families import says
from tracereader.trace.grouped import grouped
from tracereader.trace.intervals import Intervals, Lengths, both, joined, length, length_between, minus, union
from tracereader.trace.labels import AUTOGRAD, LOADER, is_phase
from tracereader.trace.slices import Frame

BETWEEN = ", between ops"
BETWEEN_OPS = f"Python{BETWEEN}"
IN_BACKWARD = f"backward's thread{BETWEEN}"  # autograd's engine, which runs no Python of its own
# The name for the same time if the trace has no ops, because the thread may be in an op that was not recorded.
NO_RECORDED_CALL = "no recorded op or call"


class GpuTime(msgspec.Struct, frozen=True):
    """The busiest device's time over a window: busy and idle add up to it, and their parts add up to busy and to idle.

    Exposed: nothing of an earlier kind (compute, communication) runs at that moment. Memsets count as copies.
    compute_by_family: where kernels overlap, a moment counts for the one that started first; the families add up to
    compute_us, the largest first. An idle gap is cut at the moment at which the next activity's launch call returned:
    `not_launched` before it, `launched` after it. A gap before an activity that started while the call ran is all
    `not_launched`, as is the time after the trace's last activity. The gap at the end of the window is cut by the
    activity that follows the window. A gap between the activities of one CUDA graph is `launched`. A gap is `unknown`
    if the next activity has no launch in the trace. Of a process with several GPUs, idle time is `elsewhere` while
    another GPU works and either the CPU waits for it or the next activity was launched.
    """

    busy_us: float
    compute_us: float
    compute_by_family: dict[str, float]
    exposed_communication_us: float
    exposed_copy_us: float
    idle_us: float
    idle_not_launched_us: float
    idle_launched_us: float
    idle_unknown_us: float
    idle_elsewhere_us: float = 0.0


class FamilyTime(msgspec.Struct, frozen=True):
    """Work of one family over the window. share: of the summed time of all families."""

    family: str
    us: float
    share: float
    pieces: int


class Parts(msgspec.Struct, frozen=True):
    """A device's window in parts: compute, exposed communication, exposed copies and three kinds of idle time.

    by_family: compute by family of kernel; see GpuTime. communication: all communication, exposed or not.
    """

    compute: Intervals
    communication: Intervals
    exposed_communication: Intervals
    exposed_copy: Intervals = []
    not_launched: Intervals = []
    launched: Intervals = []
    unknown: Intervals = []
    device: int | str = 0
    by_family: dict[str, Intervals] = {}
    elsewhere: Intervals = []

    def within(self, windows: Intervals) -> GpuTime:
        """Return the GPU's time in some intervals (ns) of the window, in sum. by_family has to cover compute."""

        def ns(part: Intervals) -> int:
            return sum(length_between(part, *window) for window in windows)

        busy = {"exposed_communication_us": ns(self.exposed_communication), "exposed_copy_us": ns(self.exposed_copy)}
        idle = {
            "idle_not_launched_us": ns(self.not_launched), "idle_launched_us": ns(self.launched),
            "idle_unknown_us": ns(self.unknown), "idle_elsewhere_us": ns(self.elsewhere),
        }  # fmt: skip
        by_family = Counter({family: ns(some) for family, some in self.by_family.items()})
        compute = by_family.total()
        return GpuTime(
            busy_us=(compute + sum(busy.values())) / 1e3,
            compute_us=compute / 1e3,
            compute_by_family={family: us / 1e3 for family, us in by_family.most_common() if us},
            idle_us=sum(idle.values()) / 1e3,
            **{name: us / 1e3 for name, us in (busy | idle).items()},
        )


def parts_by_device(work: Sequence[Work], start: int, end: int, waits: Intervals | None = None) -> list[Parts]:
    """Return the parts of the window between two stamps (ns) of each device with work there. work: by start.

    waits: when the CPU waits for a GPU, to tell what a GPU's idle time has to do with the process's other GPUs.
    """
    by_device = defaultdict(list)
    following: dict[int | str, Work] = {}
    for one in work:
        if one.start >= end:
            following.setdefault(one.device, one)
        elif one.start + one.dur > start:
            by_device[one.device].append(one)
    found = [_of_device(some, start, end, following.get(device)) for device, some in by_device.items()]
    return list(_beside_each_other(found, waits)) if waits is not None and len(found) > 1 else found


def _beside_each_other(found: Sequence[Parts], waits: Intervals) -> Iterator[Parts]:
    """Yield the parts with each device's idle time during which another one works: see GpuTime."""
    works = [union([*one.compute, *one.communication, *one.exposed_copy]) for one in found]
    for number, one in enumerate(found):
        others = union(chain.from_iterable(busy for place, busy in enumerate(works) if place != number))
        not_launched, launched = both(one.not_launched, both(others, waits)), both(one.launched, others)
        rest = {"not_launched": minus(one.not_launched, not_launched), "launched": minus(one.launched, launched)}
        yield msgspec.structs.replace(one, **rest, elsewhere=union([*not_launched, *launched]))


def busiest(parts: Sequence[Parts]) -> Parts | None:
    """Return the parts of the busiest device; None without any."""
    return max(
        parts,
        key=lambda one: length(one.compute) + length(one.exposed_communication) + length(one.exposed_copy),
        default=None,
    )


def gpu_time(parts: Sequence[Parts], windows: Intervals) -> GpuTime | None:
    """Return the busiest device's time in some intervals (ns) of the parts' window, in sum; None without parts."""
    return max((one.within(windows) for one in parts), key=lambda one: one.busy_us, default=None)


def _of_device(work: list[Work], start: int, end: int, after: Work | None) -> Parts:
    """Return the parts of one device's window. work: by start. after: its first activity after the window."""
    compute, communication, copy, not_launched, launched, unknown = [], [], [], [], [], []
    by_family: dict[str, Intervals] = defaultdict(list)
    busy = computed = start  # the ends of the work so far, and of compute so far

    def idle(left: int, right: int, following: Work | None) -> None:
        """Add the gap before the next activity."""
        if following is not None and following.launch is None:
            unknown.append((left, right))
            return
        returned = right if following is None else launched_by(following, left, right)
        if left < returned:
            not_launched.append((left, returned))
        if returned < right:
            launched.append((returned, right))

    for one in work:
        begin, stop = one.start, one.start + one.dur
        if begin < start:
            begin = start
        if stop > end:
            stop = end
        if begin > busy:
            idle(busy, begin, one)
        if stop > busy:
            busy = stop
        if one.kind != "kernel":
            copy.append((begin, stop))
        elif (family := says(one).family) == "communication":
            communication.append((begin, stop))
        else:
            compute.append((begin, stop))
            if stop > begin and stop > computed:
                by_family[family].append((begin if begin > computed else computed, stop))
                computed = stop
    if end > busy:
        idle(busy, end, after)
    compute, communication, copy = joined(compute), joined(communication), joined(copy)
    not_copy = union([*compute, *communication]) if communication else compute
    return Parts(
        compute=compute,
        by_family=dict(by_family),
        communication=communication,
        exposed_communication=minus(communication, compute) if communication else [],
        exposed_copy=minus(copy, not_copy) if copy else [],
        device=work[0].device,
        not_launched=not_launched,
        launched=launched,
        unknown=unknown,
    )


def is_communication(work: Work) -> bool:
    """Return whether the activity is a collective's kernel."""
    return work.kind == "kernel" and says(work).family == "communication"


def launched_by(following: Work, left: int, right: int) -> int:
    """Return when the launch call of the activity after a gap returned (ns), but not before the gap's start."""
    launch = following.launch
    if launch.work[0].start < following.start:
        return left  # a later activity of a running CUDA graph
    # The CPU is busy with the launch until the call returns, which takes a millisecond for a large CUDA graph.
    returned = launch.start + launch.dur
    return left if returned < left else right if returned > right else returned


def families(work: Sequence[Work], start: int, end: int) -> tuple[FamilyTime, ...]:
    """Return the summed GPU time between two stamps (ns) by family of kernel, the largest first."""
    by_family = defaultdict(list)
    for one in work:
        begin, stop = one.start, one.start + one.dur
        if begin < end and stop > start:
            by_family[says(one).family].append((stop if stop < end else end) - (begin if begin > start else start))
    times = {family: sum(some) for family, some in by_family.items()}
    total = sum(times.values())
    return tuple(
        FamilyTime(family, ns / 1e3, ns / total if total else 0.0, len(by_family[family]))
        for family, ns in sorted(times.items(), key=lambda item: -item[1])
    )


def idle_in(trace: Trace, step: Step) -> tuple[dict[str, float], dict[str, float]]:
    """Return the GPU's idle time before launches per step (µs), by the launching thread's activity, the largest first.

    The time is that from the step's first work to the next step's, as for the share of idle time (steps.py). The last
    step has no such end, so its time begins at the end of the work before it, or at the start of the only step. The gap
    before an activity counts up to the return of the activity's launch call. The first result is by the innermost op or
    runtime call on the launching thread. Outside all of them it is by BETWEEN_OPS, by IN_BACKWARD on a thread of
    autograd's engine, or by NO_RECORDED_CALL if the step's ops were not recorded; in an annotation that marks a part of
    the step, it is by the annotation (see in_annotation). The second one is the time outside all of them by Python
    function (see python_in); it is empty without stacks.
    """
    if not step.work:
        return {}, {}
    if trace.quality.mixed is not None:
        return _idle_in_all(trace)
    number = trace.steps.index(step)
    first, end = spanned(step.work)
    next_one = next((place for place in range(number + 1, len(trace.steps)) if trace.steps[place].work), number)
    # All work keeps the GPU busy, including earlier steps' work and work without a launch in the trace.
    before = [one.start + one.dur for one in trace.work[: bisect.bisect_left(trace.work, first, key=start_of)]]
    if next_one > number:
        reached, end = max([*before, first]), max(end, trace.steps[next_one].work[0].start)
    else:
        reached = max(before + [step.start] * (not number), default=step.start)
    near = trace.steps[max(0, number - 1) : next_one + 1]
    until = bisect.bisect_right(trace.work, end, key=start_of)
    return _idle_between(trace, near, step, reached, trace.work[len(before) : until])


def _idle_in_all(trace: Trace) -> tuple[dict[str, float], dict[str, float]]:
    """Return the same for steps of two kinds: the mean of all steps, from the start of the first one."""
    steps, count = trace.steps, len(trace.steps)
    until = bisect.bisect_right(trace.work, max(one.start for step in steps for one in step.work), key=start_of)
    before = bisect.bisect_left(trace.work, steps[0].start, key=start_of)
    reached = max([steps[0].start, *(one.start + one.dur for one in trace.work[:before])])
    found = _idle_between(trace, steps, next(step for step in steps if step.work), reached, trace.work[before:until])
    return tuple({name: us / count for name, us in some.items()} for some in found)


def _idle_between(
    trace: Trace, near: Sequence[Step], step: Step, reached: int, work: Sequence[Work]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the idle time (µs) before some activities from a time on: see idle_in().

    near: the steps whose ops count. step: one of them, which shows whether ops were recorded.
    """
    roots, outside = by_thread(near, step)
    gaps: dict[tuple, Intervals] = defaultdict(list)  # by the launching thread
    for one in work:
        start = one.start
        if start > reached and one.launch is not None:
            returned = launched_by(one, reached, start)
            if returned > reached:
                gaps[one.launch.track].append((reached, returned))
        stop = start + one.dur
        if stop > reached:
            reached = stop
    idle: Counter = Counter()
    between: dict[tuple, Intervals] = {track: [] for track in gaps}
    for track, some in gaps.items():
        cut_up(roots[track], some, idle, outside[track], between[track])
    in_python = python_in(trace.frames, between)
    return tuple({name: ns / 1e3 for name, ns in some.most_common() if ns} for some in (idle, in_python))


# A Python function is named if it and its calls take at least this share of the time in Python.
WORTH_NAMING = 0.1


def python_in(
    frames: dict[tuple, list[Frame]], between: dict[tuple, Intervals], share: float = WORTH_NAMING
) -> Counter:
    """Return the given time (ns) by Python function.

    Each moment counts for the innermost function with this share of the time, a built-in one for its caller, whose file
    and line the trace has. Time outside all functions is left out. between: intervals of each thread without overlaps.
    """
    calls = _Calls()
    for track, stretches in between.items():
        if track in frames:
            calls.add(frames[track], union(stretches))
    return calls.by_function(share * sum(map(length, between.values())))


def nested(frames: Iterable[Frame]) -> Iterator[tuple[str, int, int, int]]:
    """Yield one thread's Python functions, callers first: name, depth, start, and end, at the latest the caller's."""
    ends, names = [], {}
    for one in sorted(sorted(frames, key=attrgetter("end"), reverse=True), key=start_of):
        while ends and ends[-1] <= one.start:
            ends.pop()
        name = one.name
        if name not in names:
            names[name] = name.partition(" at 0x")[0]
        end = min(one.end, ends[-1]) if ends else one.end
        yield names[name], len(ends), one.start, end
        ends.append(end)


class _Calls:
    """Python functions by the calls that lead to them, with the time (ns) in which each is the innermost one."""

    def __init__(self):
        self.names, self.parents, self.own = [""], [0], [0]
        self.children: dict[tuple[int, str], int] = {}

    def add(self, frames: Sequence[Frame], stretches: Intervals) -> None:
        """Add the time that each frame has in some intervals of a thread."""
        if not stretches:
            return
        inside, path = Lengths(stretches), [0]
        # Most frames reach into no interval, and so have no time.
        starts, ends = [*(start for start, _ in stretches), math.inf], [end for _, end in stretches]
        places = map(bisect.bisect_right, repeat(ends), map(start_of, frames))
        self.own[0] += length(stretches)
        for name, depth, start, end in nested(
            one for one, place in zip(frames, places, strict=True) if starts[place] < one.end
        ):
            del path[depth + 1 :]
            path.append(self._called(path[-1], name))
            us = inside.between(start, end)
            self.own[path[-1]] += us
            self.own[path[-2]] -= us

    def _called(self, above: int, name: str) -> int:
        call = self.children.get((above, name))
        if call is None:
            call = self.children[above, name] = len(self.names)
            self.names.append(name)
            self.parents.append(above)
            self.own.append(0)
        return call

    def by_function(self, least: float) -> Counter:
        """Return the time by name. Each call's time counts for the innermost call around it with enough time."""
        held = list(self.own)
        for call in range(len(held) - 1, 0, -1):
            held[self.parents[call]] += held[call]
        found, named = Counter(), [""]
        for call in range(1, len(held)):
            name, above = self.names[call], named[self.parents[call]]
            named.append(name if not above or (held[call] >= least and not name.startswith("<built-in")) else above)
            found[named[call]] += self.own[call]
        return found


def by_thread(near: Sequence[Step], step: Step) -> tuple[dict[tuple, list[Op]], dict[tuple, str]]:
    """Return some steps' outermost slices, and the name for the time outside all recorded ops and calls, by thread.

    Threads without any have a name, too. A thread whose ops are all autograd's belongs to autograd's engine. step: one
    of the steps, which shows whether ops were recorded.
    """
    roots = grouped((root.track, root) for one in near for root in one.roots)
    if not ops_recorded(step):
        return roots, defaultdict(lambda: NO_RECORDED_CALL)
    found = defaultdict(lambda: BETWEEN_OPS)
    for track, some in roots.items():
        of_backward = (op.name.startswith(AUTOGRAD) for op in some if op.kind == "op")
        if next(of_backward, False) and all(of_backward):
            found[track] = IN_BACKWARD
    return roots, found


@lru_cache(maxsize=10_000)  # asked for each gap
def in_annotation(name: str, outside: str) -> str:
    """Return the name of the time outside all recorded ops and calls inside an annotation, by that outside it."""
    if name.startswith(LOADER):
        return name  # the thread waits for a batch, or makes it
    if outside not in (BETWEEN_OPS, NO_RECORDED_CALL) or not is_phase(name):
        return outside
    return f"Python in {name}{BETWEEN}" if outside == BETWEEN_OPS else f"{name}, {outside}"


def is_python(name: str) -> bool:
    """Return whether a name of idle time is that of Python between ops, inside an annotation or outside of all."""
    return name.endswith(BETWEEN) and name != IN_BACKWARD


# Time in ops or annotations inside as many others counts for the one at this depth. No program nests them as deep.
DEEPEST = 200


def cut_up(ops: Sequence[Op], gaps: Intervals, idle: Counter, outside: str, between: Intervals | None = None) -> None:
    """Add each moment of the gaps to the innermost open op, or where no op is open, to `outside` or the annotation.

    ops: the outermost slices of one thread, by start. gaps: at least one, disjoint and in order. between: receives the
    intervals in which no op is open.
    """
    # The way down to the innermost open op is kept from gap to gap, because the next gap often begins in the same op.
    index, name, until = _open_at(ops, gaps[0][0]), outside, math.inf
    no_op = {outside}  # the names of time in which no op is open
    above: list[tuple[Sequence[Op], int, str, float]] = []
    for at, end in gaps:
        while at < end:
            if until <= at:  # the innermost op has ended
                ops, index, name, until = above.pop()
                continue
            stop = end if end < until else until
            if index < len(ops):
                op = ops[index]
                begin = op.start
                if begin <= at:
                    ended = begin + op.dur
                    if ended <= at:
                        index += 1
                        continue
                    if op.kind != "label":
                        inner = op.name
                    elif name not in no_op:
                        inner = name
                    else:
                        inner = in_annotation(op.name, outside)
                        no_op.add(inner)
                        if inner == outside:
                            inner = name
                    if (op.children or inner in no_op) and len(above) < DEEPEST:
                        above.append((ops, index + 1, name, until))
                        ops, name, until = op.children, inner, ended if ended < until else until
                        index = _open_at(ops, at) if len(ops) > 8 else 0  # a few are passed faster one by one
                        continue
                    if ended < stop:
                        stop = ended
                    idle[inner] += stop - at
                    at = stop
                    continue
                if begin < stop:
                    stop = begin
            idle[name] += stop - at
            if between is not None and name in no_op:
                between.append((at, stop))
            at = stop


def _open_at(ops: Sequence[Op], time: int) -> int:
    """Return the place of the last op that starts at this time or before; 0 if there is none. ops: by start."""
    return max(0, bisect.bisect_right(ops, time, key=start_of) - 1)
