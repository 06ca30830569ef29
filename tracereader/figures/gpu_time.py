"""Where the GPU's time goes: exact, and adding up to the window."""

import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from tracereader.figures.intervals import Intervals, gaps, length, minus, union
from tracereader.figures.steps import spanned
from tracereader.trace import Op, Step, Trace, Work
from tracereader.trace.families import says

BETWEEN_OPS = "Python, between ops"
_start = attrgetter("start")


class GpuTime(msgspec.Struct, frozen=True):
    """The busiest device's time over a window; busy and idle add up to it, the parts of each to each.

    Exposed: nothing of a kind before it (compute, communication) runs at that moment; memsets count
    as copies. An idle gap is `launched` where the next piece's launch call had returned when the gap
    began, or has other pieces that ran before; `unknown` where that piece has no launch in the trace;
    else `not_launched`, as is the time after the last piece.
    """

    busy_us: float
    compute_us: float
    exposed_communication_us: float
    exposed_copy_us: float
    idle_us: float
    idle_not_launched_us: float
    idle_launched_us: float
    idle_unknown_us: float


class FamilyTime(msgspec.Struct, frozen=True):
    """Work of one family over the window. share: of the summed time of all."""

    family: str
    us: float
    share: float
    pieces: int


@dataclass(frozen=True)
class Parts:
    """A window of one device cut up: compute, the exposed parts and the three kinds of idleness add up to it.

    communication: all of it, also where something is computed beside it.
    """

    compute: Intervals
    communication: Intervals
    exposed_communication: Intervals
    exposed_copy: Intervals
    not_launched: Intervals
    launched: Intervals
    unknown: Intervals
    device: int | str = 0

    @property
    def busy(self) -> int:
        return length(self.compute) + length(self.exposed_communication) + length(self.exposed_copy)


def gpu_parts(work: Sequence[Work], start: int, end: int) -> Parts | None:
    """The window between two stamps (ns) on the busiest device; None without work there."""
    by_device = defaultdict(list)
    for one in work:
        if one.start < end and one.start + one.dur > start:
            by_device[one.device].append(one)
    if not by_device:
        return None
    return max((_of_device(some, start, end) for some in by_device.values()), key=lambda one: one.busy)


def gpu_time(work: Sequence[Work], start: int, end: int) -> GpuTime | None:
    """The time of the busiest device between two stamps (ns), by what it does; None without work there."""
    parts = gpu_parts(work, start, end)
    if parts is None:
        return None
    idle = [length(some) for some in (parts.not_launched, parts.launched, parts.unknown)]
    return GpuTime(
        busy_us=parts.busy / 1e3,
        compute_us=length(parts.compute) / 1e3,
        exposed_communication_us=length(parts.exposed_communication) / 1e3,
        exposed_copy_us=length(parts.exposed_copy) / 1e3,
        idle_us=sum(idle) / 1e3,
        idle_not_launched_us=idle[0] / 1e3,
        idle_launched_us=idle[1] / 1e3,
        idle_unknown_us=idle[2] / 1e3,
    )


def _of_device(work: list[Work], start: int, end: int) -> Parts:
    kinds = {"compute": [], "communication": [], "copy": []}
    for one in work:
        kind = "copy" if one.kind != "kernel" else "communication" if is_communication(one) else "compute"
        kinds[kind].append((max(one.start, start), min(one.start + one.dur, end)))
    compute, communication, copy = (union(some) for some in kinds.values())
    not_copy = union([*compute, *communication])
    idle = {"not_launched": [], "launched": [], "unknown": []}
    starts = iter(sorted(work, key=lambda one: one.start))
    following = next(starts, None)
    running: set[int] = set()  # the launches of pieces that ran: a CUDA graph's has many
    for left, right in gaps(union([*not_copy, *copy]), start, end):
        while following is not None and following.start < right:
            running.add(id(following.launch))
            following = next(starts, None)
        idle[_why_idle(following, left, running)].append((left, right))
    return Parts(
        compute=compute,
        communication=communication,
        exposed_communication=minus(communication, compute),
        exposed_copy=minus(copy, not_copy),
        device=work[0].device,
        **idle,
    )


def is_communication(work: Work) -> bool:
    """Whether it is a collective's kernel."""
    return work.kind == "kernel" and says(work).family == "communication"


def _why_idle(following: Work | None, gap_start: int, running: set[int]) -> str:
    if following is None:
        return "not_launched"
    if following.launch is None:
        return "unknown"
    # Until the call returns it is the CPU that is not done: of a large CUDA graph it takes a millisecond.
    done = following.launch.end <= gap_start or id(following.launch) in running
    return "launched" if done else "not_launched"


def families(work: Sequence[Work], start: int, end: int) -> tuple[FamilyTime, ...]:
    """Summed GPU time between two stamps (ns) by family of kernel, the largest first."""
    times, pieces = defaultdict(int), defaultdict(int)
    for one in work:
        if one.start < end and one.end > start:
            family = says(one).family
            times[family] += min(one.end, end) - max(one.start, start)
            pieces[family] += 1
    total = sum(times.values())
    return tuple(
        FamilyTime(family, ns / 1e3, ns / total if total else 0.0, pieces[family])
        for family, ns in sorted(times.items(), key=lambda item: -item[1])
    )


def idle_in(trace: Trace, step: Step) -> dict[str, float]:
    """What the launching thread was in while the GPU was idle for want of a launch, in a step (µs), the largest first.

    The gaps before each piece of the step's work, the first one's from the end of the work before it (in the
    first step, or where there is none, from the step's start), where that piece had not been launched when the
    gap began; each cut up by the innermost op or call of the driver on the thread that launches the piece;
    "Python, between ops" where it was in none.
    """
    if not step.work:
        return {}
    number = trace.steps.index(step)
    first, end = spanned(step.work)
    # All that keeps the GPU busy: also earlier steps' work, and what has no launch in the trace.
    before = [one.end for one in trace.work if one.start < first]
    reached = max(before + [step.start] * (not number), default=step.start)
    roots = roots_by_track(trace.steps[max(0, number - 1) : number + 1])
    idle: Counter = Counter()
    running: set[int] = set()
    for one in trace.work:
        if not first <= one.start <= end:
            continue
        if one.start > reached and _why_idle(one, reached, running) == "not_launched":
            cut_up(roots[one.launch.track], reached, one.start, idle)
        reached = max(reached, one.end)
        running.add(id(one.launch))
    return {name: ns / 1e3 for name, ns in idle.most_common()}


def roots_by_track(steps: Sequence[Step]) -> dict[tuple, list[Op]]:
    """The outermost slices of some steps, by thread."""
    roots = defaultdict(list)
    for step in steps:
        for root in step.roots:
            roots[root.track].append(root)
    return roots


def cut_up(ops: Sequence[Op], start: int, end: int, idle: Counter) -> None:
    """Add each moment of a gap to the innermost op that is open then."""
    pending = [(ops, start, end, BETWEEN_OPS)]
    while pending:
        ops, at, end, name = pending.pop()
        for index in range(max(0, bisect.bisect_right(ops, at, key=_start) - 1), len(ops)):
            op = ops[index]
            if op.start >= end:
                break
            if op.end <= at:
                continue
            idle[name] += max(0, op.start - at)
            stop = min(op.end, end)
            pending.append((op.children, max(op.start, at), stop, name if op.kind == "label" else op.name))
            at = stop
        idle[name] += end - at
